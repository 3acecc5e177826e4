"""How gateways and workers divide the permits of a tier."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from causeway_server.cloud_pool.admission.division import (
    CUT_S,
    JobShare,
    PeerState,
    gateway_permits,
    reserved_for_jobs,
    worker_permits,
)

names = st.text("abcdef", min_size=1, max_size=3)
demands = st.dictionaries(names, st.floats(0.0, 500.0), min_size=1)


def gateways(demands: Mapping[str, float]) -> dict[str, PeerState]:
    return {name: PeerState("gateway", demand, int(demand)) for name, demand in demands.items()}


def workers(demands: Mapping[str, float]) -> dict[str, PeerState]:
    return {name: PeerState("worker", demand, int(demand)) for name, demand in demands.items()}


@pytest.mark.parametrize(
    ("permits", "demands", "parts"),
    [
        pytest.param(16, {"a": 0.0}, {"a": 16}, id="alone and idle"),
        pytest.param(16, {"a": 90.0}, {"a": 16}, id="alone"),
        pytest.param(16, {"a": 0.0, "b": 0.0}, {"a": 8, "b": 8}, id="idle"),
        pytest.param(16, {"a": 70.0, "b": 40.0}, {"a": 8, "b": 8}, id="both full"),
        pytest.param(16, {"a": 9.0, "b": 9.0, "c": 9.0}, {"a": 6, "b": 5, "c": 5}, id="three"),
        pytest.param(16, {"a": 6.0, "b": 70.0}, {"a": 6, "b": 10}, id="what one does not need goes to the other"),
        pytest.param(16, {"a": 0.0, "b": 70.0}, {"a": 4, "b": 12}, id="an idle one keeps half of an even part"),
        pytest.param(2, {"a": 1.0, "b": 1.0, "c": 0.0}, {"a": 1, "b": 1, "c": 1}, id="more gateways than permits"),
    ],
)
def test_gateways_divide_all_permits(permits: int, demands: dict[str, float], parts: dict[str, int]) -> None:
    assert gateway_permits(permits, gateways(demands)) == parts


@given(demands, st.integers(1, 300))
def test_all_permits_are_given_and_more_demand_never_gives_less(demands: dict[str, float], permits: int) -> None:
    found = gateway_permits(permits, gateways(demands))
    assert set(found) == set(demands)
    assert min(found.values()) >= 1
    if permits >= len(demands):
        assert sum(found.values()) == permits
    for one in demands:
        for other in demands:
            if demands[one] > demands[other]:
                assert found[one] >= found[other] - 1


@given(demands, demands, st.integers(2, 300))
def test_jobs_and_requests_together_stay_within_the_permits(
    requests: dict[str, float], jobs: dict[str, float], permits: int
) -> None:
    """What gateways demand, as far as they get it, and what workers may run: but for the job that may always start."""
    peers = {
        **{f"g{name}": peer for name, peer in gateways(requests).items()},
        **{f"w{name}": peer for name, peer in workers({one: count + 1.0 for one, count in jobs.items()}).items()},
    }
    for_jobs = JobShare().permits(permits, peers, 0.0)
    assert for_jobs >= 1
    used = sum(min(part, peers[name].running) for name, part in gateway_permits(permits, peers).items())
    assert used + for_jobs <= max(permits, len(requests)) + 1


@given(st.dictionaries(names, st.tuples(st.floats(0.0, 99.0), st.integers(0, 99)), min_size=1), st.integers(1, 300))
def test_no_worker_starts_jobs_beyond_the_permits(jobs: dict[str, tuple[float, int]], permits: int) -> None:
    """Jobs that run already stay; none is started as long as they are too many."""
    peers = {name: PeerState("worker", max(demand, running), running) for name, (demand, running) in jobs.items()}
    parts = worker_permits(permits, peers)
    assert set(parts) == set(jobs)
    before = sum(peer.running for peer in peers.values())
    after = sum(max(part, peers[name].running) for name, part in parts.items())
    assert after == max(before, permits)


def test_a_new_worker_gets_its_part_as_jobs_of_the_others_end() -> None:
    found = []
    for ended in range(5):
        parts = worker_permits(8, {"a": PeerState("worker", 1e6, 8 - ended), "b": PeerState("worker", 1e6, ended)})
        found.append((parts["a"], parts["b"]))
    assert found == [(4, 0), (4, 1), (4, 2), (4, 3), (4, 4)]


@pytest.mark.parametrize("idle", ["a", "z"])
@pytest.mark.parametrize("demand", [1.0, 32.0])
def test_the_only_permit_is_for_the_one_that_has_work(idle: str, demand: float) -> None:
    """Whatever their names: a pipeline that stands by will never have any."""
    peers = {"m": PeerState("worker", demand), idle: PeerState("worker", 0.0)}
    assert all(worker_permits(1, peers, turn) == {"m": 1, idle: 0} for turn in range(9))


def test_those_that_have_work_take_turns_at_the_only_permit() -> None:
    """However much another one wants: a pipeline beside a worker with a long queue of jobs."""
    demands = {"jobs": 1e6, "messages": 1.0, "idle": 0.0}
    peers = {name: PeerState("worker", demand) for name, demand in demands.items()}
    turns = [worker_permits(1, peers, turn) for turn in range(20)]
    assert all(sum(parts.values()) == 1 for parts in turns)
    assert {name for parts in turns for name, part in parts.items() if part} == {"jobs", "messages"}


def test_twenty_workers_share_what_is_left() -> None:
    """Twenty workers together run no more jobs than one alone would."""
    peers = {**gateways({"a": 6.25, "b": 0.0}), **workers({f"w{number:02}": 64.0 for number in range(20)})}
    for_jobs = JobShare().permits(64, peers, 0.0)
    assert for_jobs == 64 - 6 - 1 - 5  # The demand, one permit, and two of the demand's standard deviations of 2.4.
    assert sum(worker_permits(for_jobs, peers).values()) == for_jobs
    assert set(worker_permits(for_jobs, peers).values()) == {2, 3}


def test_gateways_reserve_what_jobs_hold_or_may_take() -> None:
    """By their permits. More jobs than permits reserve all: the endpoints have become fewer."""
    jobs = {"v": PeerState("worker", 9.0, running=1, part=2), "w": PeerState("worker", 9.0, running=1)}
    assert reserved_for_jobs({"a": 8, "b": 8}, jobs) == {"a": 2, "b": 1}
    assert reserved_for_jobs({"a": 14, "b": 1}, jobs) == {"a": 2, "b": 1}
    assert reserved_for_jobs({"a": 1, "b": 1}, jobs) == {"a": 1, "b": 1}
    assert reserved_for_jobs({"a": 8, "b": 8}, gateways({"a": 9.0})) == {"a": 0, "b": 0}


def test_jobs_use_an_idle_pool() -> None:
    assert JobShare().permits(16, {**gateways({"a": 0.0}), **workers({"w": 16.0})}, 0.0) == 15
    assert JobShare().permits(16, workers({"w": 16.0}), 0.0) == 16


def test_where_nothing_is_left_one_job_starts_every_eight_heartbeats() -> None:
    share, peers = JobShare(), {**gateways({"a": 90.0}), **workers({"v": 8.0, "w": 8.0})}
    assert [share.permits(16, peers, 0.5 * beat) for beat in range(16)] == [1, 1, 1, 0, 0, 0, 0, 0] * 2
    parts = worker_permits(1, {**gateways({"a": 90.0}), **workers({"v": 0.0, "w": 0.0})})
    assert sorted(parts.values()) == [0, 1]


def test_jobs_come_back_slowly_after_a_burst_of_requests() -> None:
    share, burst, calm = JobShare(), gateways({"a": 12.0}), gateways({"a": 0.0})
    assert share.permits(32, burst, 0.0) == 12
    found = [share.permits(32, calm, 0.5 * beat) for beat in range(1, 20)]
    assert found == sorted(found)
    assert found[0] < 20
    assert found[-1] in (29, 30)


def test_jobs_are_halved_while_requests_wait_and_come_back() -> None:
    share = JobShare()
    short = {"a": PeerState("gateway", 0.0, lacks_capacity=True)}
    calm = {"a": PeerState("gateway", 0.0)}
    assert share.permits(64, short, 0.0) == 31
    assert share.permits(64, short, CUT_S / 2) == 31  # The effect of the first cut is not yet known.
    assert share.permits(64, short, CUT_S) == 15
    assert [share.permits(64, short, CUT_S * turn) for turn in range(2, 12)][-1] <= 1
    found = [share.permits(64, calm, 100.0 + beat) for beat in range(20)]
    assert found == sorted(found)
    assert found[-1] == 63
