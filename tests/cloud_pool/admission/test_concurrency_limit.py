"""The limit finds the knee of a server from times to first token alone, and follows it."""

from __future__ import annotations

import pytest

from causeway_server.cloud_pool.admission.concurrency_limit import ConcurrencyLimit

from .simulation import Callers, Run, Server, Simulation, TwoGateways, between, flat, server, settings

pytestmark = pytest.mark.slow

SEEDS = [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]


def overloaded(server: Server, most: int, seed: int, ends: float = 100.0) -> Run:
    """Three times the server's capacity, from the first second on."""
    return Simulation(server, [Callers(flat(3.0 * server.capacity()), "standard")], settings(most), seed).until(ends)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("knee", "most", "share"),
    [
        pytest.param(server(16, 0.3, 2.0), 64, 0.9, id="16 of at most 64"),
        pytest.param(server(16, 0.05, 2.0), 16, 0.9, id="16 of at most 16"),
        pytest.param(server(64, 0.5, 4.0), 128, 0.9, id="64 of at most 128"),
        pytest.param(server(4, 0.02, 0.5), 16, 0.9, id="4 of at most 16, small and fast"),
        # Where nearly all the time is prefill, one more request inside is less than the spread of the prompts.
        pytest.param(server(8, 0.5, 0.1), 64, 0.75, id="8 of at most 64, mostly prefill"),
    ],
)
def test_the_limit_finds_the_servers_slots(knee: Server, most: int, share: float, seed: int) -> None:
    run = overloaded(knee, most, seed)
    slots = knee.slots(0.0)
    assert run.goodput(20.0, 100.0) >= share * knee.capacity()
    assert run.mean(run.inside, 20.0, 100.0) <= max(1.5, 0.05 * slots)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("before", "after"), [(16, 8), (8, 24)])
def test_the_limit_follows_a_change_of_capacity(before: int, after: int, seed: int) -> None:
    changing = Server(lambda now: before if now < 60.0 else after, flat(0.1), flat(2.0))
    calls = [Callers(flat(40.0), "standard")]
    run = Simulation(changing, calls, settings(64), seed).until(150.0)
    assert before - 1 <= run.mean(run.limits, 30.0, 60.0) <= before * 1.3
    assert after * 0.9 <= run.mean(run.limits, 90.0, 150.0) <= after * 1.3
    assert run.goodput(90.0, 150.0) >= 0.9 * after / 2.1


@pytest.mark.parametrize("seed", SEEDS)
def test_longer_prompts_do_not_lower_the_limit_for_good(seed: int) -> None:
    changing = Server(flat(16), lambda now: 0.1 if now < 60.0 else 0.5, flat(2.0))
    run = Simulation(changing, [Callers(flat(30.0), "standard")], settings(64), seed).until(180.0)
    assert run.goodput(90.0, 180.0) >= 0.85 * 16 / 2.5


@pytest.mark.parametrize("rate", [0.0, 0.2, 2.0])
def test_an_idle_or_half_empty_tier_keeps_its_limit(rate: float) -> None:
    run = Simulation(server(16, 0.3, 2.0), [Callers(flat(rate), "standard")], settings(64)).until(300.0)
    assert {limit for _, limit in run.limits} == {32}


@pytest.mark.parametrize("seed", SEEDS)
def test_an_untested_high_limit_is_lowered_within_seconds(seed: int) -> None:
    calls = [Callers(flat(1.0), "standard"), Callers(between(60.0, 160.0, 20.0), "standard")]
    run = Simulation(server(16, 0.1, 2.0), calls, settings(64), seed).until(160.0)
    assert 15 <= run.mean(run.limits, 85.0, 160.0) <= 19


@pytest.mark.parametrize("seed", SEEDS)
def test_two_independent_gateways_use_most_of_a_server(seed: int) -> None:
    shared = server(16, 0.2, 0.3)
    run = TwoGateways(shared, [Callers(flat(3.0 * shared.capacity()), "standard")], settings(16), seed).until(100.0)
    assert run.goodput(20.0, 100.0) >= 0.85 * shared.capacity()
    assert run.mean(run.inside, 20.0, 100.0) <= 16 / 3


def fed(limit: ConcurrencyLimit, now: float, ttft_s: float, *, seconds: float, rate: float = 10.0) -> float:
    """First tokens at this rate with all permits held, each this late. Returns the time after it."""
    for _ in range(int(seconds * rate)):
        now += 1.0 / rate
        limit.first_token(now, ttft_s, limit.value)
    return now


def test_a_cut_without_relief_is_undone() -> None:
    limit = ConcurrencyLimit(1, 20)
    now = fed(limit, 0.0, 0.1, seconds=20.0)
    before = limit.value
    lowest = before
    for _ in range(20):
        now = fed(limit, now, 0.5, seconds=1.0)
        lowest = min(lowest, limit.value)
    assert lowest < before <= limit.value


def test_the_objective_bounds_a_base_that_was_never_good() -> None:
    """A gateway that starts before a crowded server cuts at once."""
    with_objective, without = ConcurrencyLimit(1, 20, objective_s=1.0), ConcurrencyLimit(1, 20)
    for limit in (with_objective, without):
        fed(limit, 0.0, 3.0, seconds=5.0)
    assert with_objective.value < 10 <= without.value


def test_failures_lower_each_limit_once() -> None:
    limit = ConcurrencyLimit(1, 40)
    for _ in range(10):
        limit.failed(5.0, handed_at=4.0)
    assert limit.value == 18
    limit.failed(7.0, handed_at=6.0)
    assert limit.value == 16
    for at in range(8, 200):
        limit.failed(at + 0.5, handed_at=at)
    assert limit.value == 1


def test_a_fixed_limit_stays() -> None:
    limit = ConcurrencyLimit(8, 8)
    limit.failed(1.0, handed_at=0.5)
    fed(limit, 1.0, 9.0, seconds=20.0)
    assert limit.value == 8
