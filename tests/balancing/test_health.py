"""Who is ejected, when and for how long, with a clock that is an argument."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloud_pool.balancing import health
from cloud_pool.balancing.config import LoadBalancingConfig
from cloud_pool.balancing.state import Endpoint, PoolState
from cloud_pool.upstreams.triton.errors import StubProcessDied
from router.errors import (
    CausewayError,
    ClientGone,
    CloudFailed,
    CloudRejected,
    CloudTimeout,
    CloudUnreachable,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineUnavailable,
    QueueFull,
    StreamBroken,
)

CONFIG = LoadBalancingConfig()
REFUSED = CloudUnreachable("no", phase="connect")
RAISED = CloudFailed("no")
LATE = DeadlineExceeded("no")


def pool(count: int) -> PoolState:
    return PoolState(tuple(Endpoint(address=f"t{at}") for at in range(count)))


def failed(
    state: PoolState, error: CausewayError, now: float = 0.0, silent_s: float = 0.0, at: int = 0
) -> health.Changed:
    return health.call_failed(state, f"t{at}", error, now, CONFIG, silent_s=silent_s)


def never(address: str) -> float:
    return -math.inf


# --- passive ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [REFUSED, EngineUnavailable("no"), StubProcessDied("no")])
def test_who_refuses_is_ejected_at_once(error: CausewayError) -> None:
    """A connection that is refused, and a model that is away, need no second try."""
    state, ask = failed(pool(2), error)
    assert [one.phase for one in state.endpoints] == ["ejected", "active"]
    assert (ask, state.endpoints[0].last_error) == ((), error.code)


def test_faults_in_a_row_eject() -> None:
    """The third fault in a row does it; an answer in between starts the count anew."""
    state = pool(2)
    for _ in range(2):
        state, _ = failed(state, RAISED)
    state = health.call_succeeded(state, "t0")
    for _ in range(2):
        state, _ = failed(state, RAISED)
    assert state.healthy == 2
    state, _ = failed(state, RAISED)
    assert state.endpoints[0].phase == "ejected"


def test_a_broken_stream_is_a_reason_to_ask() -> None:
    """One may be the network's; whether it is the endpoint's is asked at once."""
    state, ask = failed(pool(2), StreamBroken("no", phase="stream"))
    assert (state.healthy, ask) == (2, ("t0",))


@pytest.mark.parametrize("error", [QueueFull("no"), CloudRejected("no"), ContextLengthExceeded("no"), ClientGone("no")])
def test_what_is_not_the_endpoints_fault_is_not_held_against_it(error: CausewayError) -> None:
    """Bad requests, a full queue and callers that leave say nothing about health, however many."""
    state = pool(2)
    for _ in range(10):
        state, ask = failed(state, error, silent_s=9.0)
        assert ask == ()
    assert state == pool(2)


@pytest.mark.parametrize("error", [LATE, CloudTimeout("no")])
def test_a_stuck_deadline_ejects(error: CausewayError) -> None:
    """Nothing came from the endpoint until the deadline, to nobody: it hangs."""
    state, _ = failed(pool(2), error, silent_s=CONFIG.silent_before_probe_s)
    assert state.endpoints[0].phase == "ejected"


def test_a_late_answer_of_an_endpoint_that_works_is_no_fault() -> None:
    """Somebody else heard from it meanwhile: the caller's time was too short."""
    state, ask = failed(pool(2), LATE, silent_s=0.01)
    assert (state, ask) == (pool(2), ())


def test_a_short_stuck_deadline_makes_ask() -> None:
    """Too short to judge, long enough to doubt: a real request tells."""
    state, ask = failed(pool(2), LATE, silent_s=0.5)
    assert (state.healthy, ask) == (2, ("t0",))


def test_whoever_left_before_anything_came_makes_ask() -> None:
    """A hedge that won elsewhere must not hide that the first endpoint hangs."""
    state, ask = health.call_abandoned(pool(2), "t0", CONFIG, silent_s=0.5)
    assert ask == ("t0",)
    assert health.call_abandoned(state, "t0", CONFIG, silent_s=0.5)[1] == (), "once at a time"
    assert health.call_abandoned(pool(2), "t0", CONFIG, silent_s=0.1)[1] == ()


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([REFUSED, RAISED, LATE])), max_size=60), st.integers(1, 5))
def test_suspicion_takes_a_share_only(faults: list[tuple[int, CausewayError]], count: int) -> None:
    """However many calls fail, half of the pool stays; the others are asked."""
    state = pool(count)
    for at, error in faults:
        state, _ = failed(state, error, silent_s=9.0, at=at)
        assert state.healthy >= math.ceil(count / 2)


def test_who_may_not_be_ejected_is_asked_and_the_proof_ejects() -> None:
    """A pool of one is never emptied on suspicion, but it is by a real request that fails."""
    state, ask = failed(pool(1), REFUSED)
    assert (state.healthy, ask) == (1, ("t0",))
    state = health.probe_finished(state, "t0", "dead", "cloud_unreachable", 1.0, CONFIG)
    assert (state.healthy, state.endpoints[0].not_before) == (0, 1.0 + CONFIG.base_ejection_s)


# --- active ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "heard", "probe_result"),
    [
        (None, True, "healthy"),
        (CloudRejected("no"), True, "healthy"),
        (QueueFull("no"), False, "healthy"),
        (LATE, True, "busy"),
        (LATE, False, "dead"),
        (REFUSED, True, "dead"),
        (RAISED, True, "dead"),
        (EngineUnavailable("no"), False, "dead"),
    ],
)
def test_what_a_probe_says(error: CausewayError | None, heard: bool, probe_result: str) -> None:
    """A refusal is an answer; a late one is none, unless others were answered meanwhile."""
    assert health.probe_result_of(error, heard) == probe_result


def test_it_comes_back_when_it_answers() -> None:
    """After its time it is asked, once at a time; an answer lets it in, as one that has just come."""
    state, _ = failed(pool(2), REFUSED, now=10.0)
    assert health.due_probes(state, 10.4, CONFIG, never)[1] == ()
    state, ask = health.due_probes(state, 10.5, CONFIG, never)
    assert ask == ("t0",)
    assert health.due_probes(state, 11.0, CONFIG, never)[1] == ()
    state = health.probe_finished(state, "t0", "healthy", "", 11.0, CONFIG)
    one = state.endpoints[0]
    assert (one.phase, one.phase_since, one.failures, one.last_error) == ("active", 11.0, 0, "")


def test_who_is_asked_in_vain_is_asked_again_soon() -> None:
    """Each two seconds at the latest, however long it was away: when it is well again it may be needed."""
    state, _ = failed(pool(2), REFUSED, now=0.0)
    waits = []
    for _ in range(5):
        until = state.endpoints[0].not_before
        waits.append(until - state.endpoints[0].phase_since)
        state = health.probe_finished(state, "t0", "dead", "cloud_unreachable", until, CONFIG)
    assert waits == [0.5, 1.0, 2.0, 2.0, 2.0]


def test_a_relapse_keeps_it_out_for_longer() -> None:
    """Who answers probes and fails requests is out for twice as long each time, up to the longest; a good time of that
    length starts anew."""
    state, now, waits = pool(2), 0.0, []
    for _ in range(9):
        state, _ = failed(state, REFUSED, now=now)
        waits.append(state.endpoints[0].not_before - now)
        now = state.endpoints[0].not_before
        state = health.probe_finished(state, "t0", "healthy", "", now, CONFIG)
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    recovered, _ = failed(state, REFUSED, now=now + CONFIG.max_ejection_s)
    assert recovered.endpoints[0].not_before == now + CONFIG.max_ejection_s + CONFIG.base_ejection_s


def relapsing(state: PoolState, address: str, times: int) -> PoolState:
    """Ejected at 100.0, and so often in a row that it is out for the longest time."""
    one = state.get(address)
    assert one is not None
    state, _ = health.call_failed(
        state.replace(msgspec.structs.replace(one, ejections=times, phase_since=99.0)),
        address,
        REFUSED,
        100.0,
        CONFIG,
        silent_s=0.0,
    )
    return state


def test_when_others_fall_too_each_is_asked_soon() -> None:
    """With less than half of a pool left there is little to protect: who was to stay out for long may be well by now,
    and its strength is wanted."""
    state = relapsing(pool(3), "t0", 9)
    assert state.endpoints[0].not_before == 130.0
    assert health.due_probes(state, 100.0 + CONFIG.base_ejection_s, CONFIG, never)[1] == ()
    state = health.probe_finished(state, "t1", "dead", "deadline_exceeded", 100.0, CONFIG)
    assert "t0" in health.due_probes(state, 100.0 + CONFIG.base_ejection_s, CONFIG, never)[1]
    alone = health.probe_finished(pool(1), "t0", "dead", "cloud_unreachable", 100.0, CONFIG)
    assert health.due_probes(alone, 100.0 + CONFIG.base_ejection_s, CONFIG, never)[1] == ("t0",)


def test_the_silent_that_have_work_are_asked() -> None:
    """Silence alone is none's fault, and neither is work: both together are a question."""
    busy = Endpoint(address="t0", open_since=(0.0,), waiting_since=(0.0,))
    state = PoolState((busy, Endpoint(address="t1")))
    assert health.due_probes(state, 1.0, CONFIG, never)[1] == ("t0",)
    assert health.due_probes(state, 0.9, CONFIG, never)[1] == ()
    assert health.due_probes(state, 1.0, CONFIG, lambda _: 0.5)[1] == ()


def test_a_hung_replica_is_out_within_two_seconds_of_its_first_stuck_deadline() -> None:
    """Also when the deadline is short, nobody may be ejected on suspicion, and calls have deadlines of their own: by
    then the question that it makes was asked and its time is over."""
    state, ask = failed(pool(1), LATE, now=0.3, silent_s=0.3)
    assert ask == ("t0",)
    state = health.probe_finished(
        state,
        "t0",
        health.probe_result_of(LATE, received_during_probe=False),
        LATE.code,
        0.3 + CONFIG.probe_timeout_s,
        CONFIG,
    )
    assert state.healthy == 0
    assert state.endpoints[0].phase_since - 0.3 < 2.0


def test_an_overloaded_endpoint_is_not_taken_for_hung() -> None:
    """A probe that waits behind others that are answered ejects nobody."""
    state = health.probe_finished(
        pool(1), "t0", health.probe_result_of(LATE, received_during_probe=True), LATE.code, 1.0, CONFIG
    )
    assert state.healthy == 1


def test_calls_that_hang_are_ended() -> None:
    """Ejected and silent for long: its running calls would wait until their deadlines."""
    one = Endpoint(address="t0", phase="ejected", open_since=(0.0,))
    assert health.hung(PoolState((one,)), 10.0, CONFIG, never) == ("t0",)
    assert health.hung(PoolState((one,)), 9.9, CONFIG, never) == ()
    assert health.hung(PoolState((one,)), 10.0, CONFIG, lambda _: 1.0) == ()
    assert health.hung(PoolState((msgspec.structs.replace(one, phase="active"),)), 10.0, CONFIG, never) == ()


def test_calls_that_did_not_begin_are_moved_where_others_can_take_them() -> None:
    """Sooner, for they lose nothing; with nobody else they may as well wait."""
    one = Endpoint(address="t0", phase="ejected", open_since=(0.0,))
    assert health.stalled(PoolState((one, Endpoint(address="t1"))), 2.0, CONFIG, never) == ("t0",)
    assert health.stalled(PoolState((one, Endpoint(address="t1"))), 1.9, CONFIG, never) == ()
    assert health.stalled(PoolState((one,)), 2.0, CONFIG, never) == ()


# --- membership ------------------------------------------------------------------------------------------------------


def test_the_first_are_in_at_once_and_later_ones_are_asked() -> None:
    """Nobody waits at the start; who joins a pool that works shows first that it does."""
    state = health.with_endpoints(PoolState(), {"t0": "a"}, 0.0)
    assert [(one.address, one.phase, one.zone) for one in state.endpoints] == [("t0", "active", "a")]
    state = health.with_endpoints(state, {"t0": "b", "t1": ""}, 1.0)
    assert [(one.address, one.phase, one.zone) for one in state.endpoints] == [
        ("t0", "active", "b"),
        ("t1", "ejected", ""),
    ]
    assert health.due_probes(state, 1.0, CONFIG, never)[1] == ("t1",)


def test_who_is_not_named_drains_and_goes() -> None:
    """Running calls keep it; with the last one it is gone."""
    state = pool(2).replace(Endpoint(address="t0", open_since=(0.0, 0.0)))
    state = health.with_endpoints(state, {"t1": ""}, 1.0)
    assert state.endpoints[0].phase == "draining"
    assert health.without_drained(state) == state
    state = health.without_drained(state.replace(msgspec.structs.replace(state.endpoints[0], open_since=())))
    assert [one.address for one in state.endpoints] == ["t1"]


def test_who_is_idle_goes_at_once() -> None:
    """Nothing runs there, nothing is to be waited for."""
    assert [one.address for one in health.with_endpoints(pool(2), {"t1": ""}, 1.0).endpoints] == ["t1"]


def test_who_is_named_again_is_asked_first() -> None:
    """It may have gone for a reason."""
    state = health.with_endpoints(pool(2).replace(Endpoint(address="t0", open_since=(0.0,))), {"t1": ""}, 1.0)
    state = health.with_endpoints(state, {"t0": "", "t1": ""}, 2.0)
    assert (state.endpoints[0].phase, state.endpoints[0].outstanding) == ("ejected", 1)
    assert health.due_probes(state, 2.0, CONFIG, never)[1] == ("t0",)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("fail"), st.integers(0, 3), st.sampled_from([REFUSED, RAISED, LATE])),
            st.tuples(st.just("probe"), st.integers(0, 3), st.sampled_from(["healthy", "dead", "busy"])),
            st.tuples(st.just("name"), st.sets(st.integers(0, 3), min_size=1), st.none()),
            st.tuples(st.just("due"), st.integers(0, 3), st.none()),
        ),
        max_size=40,
    )
)
def test_no_endpoint_is_lost_or_doubled(events: list[tuple[str, object, object]]) -> None:
    """After any events the pool has exactly the endpoints that are named, each in a phase that names one."""
    state, named = pool(4), {0, 1, 2, 3}
    for now, (kind, what, how) in enumerate(events):
        if kind == "fail":
            state, _ = failed(state, how, float(now), 9.0, what)  # type: ignore[arg-type]
        elif kind == "probe":
            state = health.probe_finished(state, f"t{what}", how, "x", float(now), CONFIG)  # type: ignore[arg-type]
        elif kind == "name":
            named = what  # type: ignore[assignment]
            state = health.with_endpoints(state, {f"t{at}": "" for at in named}, float(now))
        else:
            state, _ = health.due_probes(state, float(now), CONFIG, never)
        assert sorted(one.address for one in state.endpoints) == sorted(f"t{at}" for at in named)
        assert all(one.phase in ("active", "ejected") for one in state.endpoints)
