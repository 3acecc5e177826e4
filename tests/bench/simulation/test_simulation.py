"""Simulated rollouts with fixed seeds: what a fleet is promised, in small; the command measures it at full size."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from click.testing import CliRunner

from causeway_server.fleet.rollout.settings import RolloutState

from .__main__ import main
from .devices import Effect, draw_devices, draw_weather, observe
from .polls import PollModel, polls_after_wake, reconnect_storm, revert_times, served, told_times
from .rollouts import simulate_rollout

DEVICES = 5_000


@pytest.mark.slow
def test_a_bundle_that_changes_nothing_is_not_aborted() -> None:
    """Devices that fail by themselves, incidents everywhere and sites that go down are on both sides alike."""
    runs = [simulate_rollout(seed, DEVICES, Effect(), accepts=True) for seed in range(25)]
    assert Counter(run.state for run in runs) == {RolloutState.DONE: 25}
    assert all(run.exposed > 0.9 * DEVICES for run in runs)  # the others are off


@pytest.mark.slow
def test_five_percent_of_errors_stop_at_the_first_stage() -> None:
    """Without an operator, and all devices that can be reached are back within a minute."""
    runs = [simulate_rollout(seed, DEVICES, Effect(errors=0.05)) for seed in range(40)]
    assert Counter((run.state, run.stage) for run in runs) == {(RolloutState.REVERTED, 0): 40}
    assert max(run.exposed for run in runs) < 0.02 * DEVICES
    assert np.percentile(np.concatenate([run.reverted_s for run in runs]), 99) < 60


@pytest.mark.slow
@pytest.mark.parametrize(
    "effect",
    [Effect(slower=1.5), Effect(silenced=0.1), Effect(rolled_back=0.1)],
    ids=["slower", "silenced", "rolled back"],
)
def test_other_harm_gets_no_further_than_the_second_stage(effect: Effect) -> None:
    """Aborted, or paused as inconclusive: it never passes."""
    runs = [simulate_rollout(seed, DEVICES, effect) for seed in range(20)]
    assert all(run.state in (RolloutState.REVERTED, RolloutState.PAUSED) and run.stage <= 1 for run in runs)


@pytest.mark.slow
def test_a_small_fleet_pauses_where_nothing_is_certain() -> None:
    """One device of 20 cannot prove anything by its requests; an approver decides."""
    runs = [simulate_rollout(seed, 20, Effect(errors=0.05)) for seed in range(20)]
    assert Counter((run.state, run.stage) for run in runs) == {(RolloutState.PAUSED, 0): 20}
    assert all(1 <= run.exposed <= 2 for run in runs)


def test_the_same_seed_gives_the_same_run() -> None:
    first, second = (simulate_rollout(7, 500, Effect(errors=0.1)) for _ in range(2))
    assert first.reverted_s.tolist() == second.reverted_s.tolist()
    assert (first.took_s, first.exposed, first.reason) == (second.took_s, second.exposed, second.reason)


@pytest.mark.parametrize("devices", [DEVICES, 100_000])
def test_every_device_is_back_within_a_minute_of_a_fail(devices: int) -> None:
    """Also from the last stage, where all devices run the bundle; processes grow with the fleet."""
    times = revert_times(np.random.default_rng(1), devices, devices, PollModel())
    assert np.percentile(times, 99) < 60


def test_without_more_processes_a_large_fleet_takes_longer() -> None:
    """The model has the limit of one process: its answers per second."""
    one = PollModel(devices_per_process=1_000_000)
    rounds_s = 100_000 / one.requests_per_s
    assert np.median(told_times(np.random.default_rng(1), 100_000, 100_000, one)) > one.fetches * rounds_s


@pytest.mark.parametrize("outage_s", [0.0, 5.0, 20.0, 40.0, 60.0, 300.0, 1800.0])
def test_ten_thousand_devices_that_reconnect_come_evenly(outage_s: float) -> None:
    storm = reconnect_storm(np.random.default_rng(2), 10_000, outage_s, PollModel())
    assert storm.peak_over_mean <= 3
    assert storm.settled_s <= 60


def test_waits_that_double_from_a_second_make_a_storm() -> None:
    """The simulation finds it: why the agent's waits do not grow."""
    doubling = PollModel(reconnect_s=1.0, reconnect_growth=2.0)
    assert reconnect_storm(np.random.default_rng(2), 10_000, 20.0, doubling).peak_over_mean > 3


def test_polls_stay_spread_after_a_wake() -> None:
    load = polls_after_wake(np.random.default_rng(3), 10_000, 3600.0, PollModel())
    assert load.peak_over_mean <= 3
    assert load.mean_per_s == pytest.approx(10_000 / 225, rel=0.05)


def test_a_queue_answers_in_order_and_no_faster_than_it_can() -> None:
    times = served(np.array([0.0, 5.0, 0.1, 0.2]), rate=2.0)
    assert times.tolist() == pytest.approx([0.5, 5.5, 1.0, 1.5])


def test_idle_dark_and_failing_devices_are_in_the_fleet() -> None:
    """A fleet of equal devices would make any statistic look good."""
    rng = np.random.default_rng(4)
    devices = draw_devices(rng, 20_000, "salt")
    seen = observe(rng, devices, np.arange(20_000), (0.0, 600.0), draw_weather(rng, 20_000), 900.0)
    shares = (np.mean(seen.requests < 10), np.mean(devices.off_at < 0), np.mean(devices.errors > 0.05))
    assert np.all(np.array(shares) > [0.1, 0.02, 0.01])
    assert devices.cloned.any()
    assert (seen.latency.sum(axis=1) == seen.requests).all()


@pytest.mark.slow
def test_the_command_reports_each_case() -> None:
    result = CliRunner().invoke(main, ["--devices", "200", "--rollouts", "2"])
    assert result.exit_code == 0, result.output
    assert "the same bundle on both sides: 2 done" in result.output
    assert "reconnects after outages of 0 to 1800 s: peak over mean at most" in result.output
