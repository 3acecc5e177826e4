"""Ejection and readmission: pure transitions, time is an argument."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from causeway_server.cloud_pool.dispatch import health
from causeway_server.cloud_pool.dispatch.config import LoadBalancingConfig
from causeway_server.cloud_pool.dispatch.endpoint_selection import Endpoint, PoolState
from causeway_server.cloud_pool.upstreams.triton.errors import StubProcessDied
from causeway_server.router.errors import (
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
def test_a_refusing_endpoint_is_ejected_at_once(error: CausewayError) -> None:
    state, to_probe = failed(pool(2), error)
    assert [one.phase for one in state.endpoints] == ["ejected", "active"]
    assert (to_probe, state.endpoints[0].last_error) == ((), error.code)


def test_failures_in_a_row_eject() -> None:
    """A success in between restarts the count."""
    state = pool(2)
    for _ in range(2):
        state, _ = failed(state, RAISED)
    state = health.call_succeeded(state, "t0")
    for _ in range(2):
        state, _ = failed(state, RAISED)
    assert state.healthy == 2
    state, _ = failed(state, RAISED)
    assert state.endpoints[0].phase == "ejected"


def test_a_broken_stream_causes_a_probe() -> None:
    state, to_probe = failed(pool(2), StreamBroken("no", phase="stream"))
    assert (state.healthy, to_probe) == (2, ("t0",))


@pytest.mark.parametrize("error", [QueueFull("no"), CloudRejected("no"), ContextLengthExceeded("no"), ClientGone("no")])
def test_callers_errors_do_not_count_against_the_endpoint(error: CausewayError) -> None:
    state = pool(2)
    for _ in range(10):
        state, to_probe = failed(state, error, silent_s=9.0)
        assert to_probe == ()
    assert state == pool(2)


@pytest.mark.parametrize("error", [LATE, CloudTimeout("no")])
def test_a_deadline_without_any_received_data_ejects(error: CausewayError) -> None:
    state, _ = failed(pool(2), error, silent_s=CONFIG.silent_before_probe_s)
    assert state.endpoints[0].phase == "ejected"


def test_a_deadline_at_a_responding_endpoint_is_no_failure() -> None:
    state, to_probe = failed(pool(2), LATE, silent_s=0.01)
    assert (state, to_probe) == (pool(2), ())


def test_a_short_deadline_in_silence_causes_a_probe() -> None:
    state, to_probe = failed(pool(2), LATE, silent_s=0.5)
    assert (state.healthy, to_probe) == (2, ("t0",))


def test_an_abandoned_call_causes_a_probe() -> None:
    """Callers who leave must not hide that the endpoint hangs."""
    state, to_probe = health.call_abandoned(pool(2), "t0", CONFIG, silent_s=0.5)
    assert to_probe == ("t0",)
    assert health.call_abandoned(state, "t0", CONFIG, silent_s=0.5)[1] == (), "once at a time"
    assert health.call_abandoned(pool(2), "t0", CONFIG, silent_s=0.1)[1] == ()


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([REFUSED, RAISED, LATE])), max_size=60), st.integers(1, 5))
def test_suspicion_ejects_at_most_half_of_the_pool(faults: list[tuple[int, CausewayError]], count: int) -> None:
    state = pool(count)
    for at, error in faults:
        state, _ = failed(state, error, silent_s=9.0, at=at)
        assert state.healthy >= math.ceil(count / 2)


def test_the_last_endpoint_is_ejected_by_a_failed_probe_only() -> None:
    state, to_probe = failed(pool(1), REFUSED)
    assert (state.healthy, to_probe) == (1, ("t0",))
    state = health.probe_finished(state, "t0", "dead", "cloud_unreachable", 1.0, CONFIG)
    assert (state.healthy, state.endpoints[0].not_before) == (0, 1.0 + CONFIG.base_ejection_s)


# --- active ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "received", "probe_result"),
    [
        (None, True, "healthy"),
        (CloudRejected("no"), True, "healthy"),
        (QueueFull("no"), False, "healthy"),
        (LATE, True, "busy"),
        (LATE, False, "silent"),
        (REFUSED, True, "dead"),
        (RAISED, True, "dead"),
        (EngineUnavailable("no"), False, "dead"),
    ],
)
def test_probe_results(error: CausewayError | None, received: bool, probe_result: str) -> None:
    """A refusal is an answer; a late probe is silence, unless other calls received data meanwhile."""
    assert health.probe_result_of(error, received) == probe_result


def test_a_successful_probe_readmits() -> None:
    state, _ = failed(pool(2), REFUSED, now=10.0)
    assert health.due_probes(state, 10.4, CONFIG, never)[1] == ()
    state, to_probe = health.due_probes(state, 10.5, CONFIG, never)
    assert to_probe == ("t0",)
    assert health.due_probes(state, 11.0, CONFIG, never)[1] == ()
    state = health.probe_finished(state, "t0", "healthy", "", 11.0, CONFIG)
    one = state.endpoints[0]
    assert (one.phase, one.phase_since, one.failures, one.last_error) == ("active", 11.0, 0, "")


def test_failed_probes_are_repeated_within_two_seconds() -> None:
    state, _ = failed(pool(2), REFUSED, now=0.0)
    waits = []
    for _ in range(5):
        until = state.endpoints[0].not_before
        waits.append(until - state.endpoints[0].phase_since)
        state = health.probe_finished(state, "t0", "dead", "cloud_unreachable", until, CONFIG)
    assert waits == [0.5, 1.0, 2.0, 2.0, 2.0]


def test_each_relapse_doubles_the_ejection() -> None:
    """An active time of the longest ejection starts again."""
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
    """An endpoint ejected at 100.0 for the longest time."""
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


def test_with_less_than_half_active_every_ejected_endpoint_is_probed_soon() -> None:
    state = relapsing(pool(3), "t0", 9)
    assert state.endpoints[0].not_before == 130.0
    assert health.due_probes(state, 100.0 + CONFIG.base_ejection_s, CONFIG, never)[1] == ()
    state = health.probe_finished(state, "t1", "dead", "deadline_exceeded", 100.0, CONFIG)
    assert "t0" in health.due_probes(state, 100.0 + CONFIG.base_ejection_s, CONFIG, never)[1]
    alone = health.probe_finished(pool(1), "t0", "dead", "cloud_unreachable", 100.0, CONFIG)
    assert health.due_probes(alone, 100.0 + CONFIG.base_ejection_s, CONFIG, never)[1] == ("t0",)


def test_only_silent_endpoints_with_open_calls_are_probed() -> None:
    busy = Endpoint(address="t0", open_since=(0.0,), waiting_since=(0.0,))
    state = PoolState((busy, Endpoint(address="t1")))
    assert health.due_probes(state, 1.0, CONFIG, never)[1] == ("t0",)
    assert health.due_probes(state, 0.9, CONFIG, never)[1] == ()
    assert health.due_probes(state, 1.0, CONFIG, lambda _: 0.5)[1] == ()


def test_a_hung_endpoint_is_ejected_within_two_seconds_of_the_first_missed_deadline() -> None:
    """Even with a short deadline."""
    state, to_probe = failed(pool(2), LATE, now=0.3, silent_s=0.3)
    assert to_probe == ("t0",)
    state = silent_probe(state, 0.3 + CONFIG.probe_timeout_s)
    assert state.healthy == 1
    assert state.endpoints[0].phase_since - 0.3 < 2.0


def silent_probe(state: PoolState, now: float, at: int = 0) -> PoolState:
    took_s = CONFIG.probe_timeout_s
    return health.probe_finished(state, f"t{at}", "silent", LATE.code, now, CONFIG, took_s=took_s)


def test_silence_does_not_eject_the_only_endpoint_before_it_hangs() -> None:
    """It is probed again and again, also without open calls; then even the last one is ejected."""
    state, now = pool(1), 0.0
    while now + CONFIG.probe_timeout_s < CONFIG.hung_after_s:
        now += CONFIG.probe_timeout_s
        state = silent_probe(state, now)
        assert state.healthy == 1
        assert health.due_probes(state, now, CONFIG, never)[1] == ("t0",)
    state = silent_probe(state, CONFIG.hung_after_s)
    assert (state.healthy, state.endpoints[0].last_error) == (0, LATE.code)


@pytest.mark.parametrize("result", ["healthy", "busy"])
def test_an_answer_ends_the_silence(result: health.ProbeResult) -> None:
    state = silent_probe(pool(1), 8.0)
    state = health.probe_finished(state, "t0", result, "", 9.0, CONFIG)
    assert health.due_probes(state, 9.0, CONFIG, never)[1] == ()
    assert silent_probe(state, 11.0).healthy == 1


@given(st.integers(1, 6))
def test_silent_probes_eject_a_share_of_the_pool(count: int) -> None:
    state = pool(count)
    for at in range(count):
        state = silent_probe(state, 1.5, at)
    assert state.healthy == math.ceil(count / 2)


@pytest.mark.parametrize("error", [REFUSED, RAISED, EngineUnavailable("no")])
def test_a_refused_or_failed_probe_ejects_the_only_endpoint(error: CausewayError) -> None:
    result = health.probe_result_of(error, received_during_probe=False)
    assert health.probe_finished(pool(1), "t0", result, error.code, 1.0, CONFIG).healthy == 0


def reading(tokens: int, *, prefill_s: float = 0.0, others: int = 0) -> PoolState:
    """An endpoint where a prompt waits since 0.0, and others."""
    one = Endpoint(address="t0", open_since=(0.0,), waiting_since=(0.0,), waiting_tokens=tokens, prefill_s=prefill_s)
    return PoolState((one, *(Endpoint(address=f"t{at}") for at in range(1, others + 1))))


def test_the_only_endpoint_may_read_a_long_prompt_in_silence() -> None:
    """As long as the slowest reading takes that is expected, and `hung_after_s` more."""
    tokens = 1000
    reads_s = tokens / CONFIG.prefill_tokens_per_s
    state = silent_probe(reading(tokens), CONFIG.probe_timeout_s)
    assert silent_probe(state, reads_s + CONFIG.hung_after_s - 0.1).healthy == 1
    assert silent_probe(state, reads_s + CONFIG.hung_after_s).healthy == 0
    state, _ = failed(reading(tokens), LATE, now=reads_s, silent_s=reads_s)
    assert (state.healthy, state.endpoints[0].failures) == (1, 0)


def test_one_of_several_endpoints_may_read_for_as_long_as_it_usually_takes() -> None:
    state = silent_probe(reading(1000, prefill_s=0.004, others=1), CONFIG.probe_timeout_s)
    assert state.healthy == 2
    assert silent_probe(state, 8.1).healthy == 1
    unmeasured = silent_probe(reading(1000, others=1), CONFIG.probe_timeout_s)
    assert unmeasured.healthy == 1


def test_running_answers_of_an_ejected_endpoint_are_ended_after_the_expected_reading_only() -> None:
    state = reading(1000, prefill_s=0.004, others=1)
    state = state.replace(msgspec.structs.replace(state.endpoints[0], phase="ejected"))
    assert health.hung(state, 17.9, CONFIG, never) == ()
    assert health.hung(state, 18.0, CONFIG, never) == ("t0",)
    assert health.hung(state, 9.9, CONFIG, never, begun=False) == ()
    assert health.hung(state, 10.0, CONFIG, never, begun=False) == ("t0",)


def test_a_busy_probe_does_not_eject() -> None:
    state = health.probe_finished(
        pool(1), "t0", health.probe_result_of(LATE, received_during_probe=True), LATE.code, 1.0, CONFIG
    )
    assert state.healthy == 1


def test_calls_of_a_hung_endpoint_are_ended() -> None:
    one = Endpoint(address="t0", phase="ejected", open_since=(0.0,))
    assert health.hung(PoolState((one,)), 10.0, CONFIG, never) == ("t0",)
    assert health.hung(PoolState((one,)), 9.9, CONFIG, never) == ()
    assert health.hung(PoolState((one,)), 10.0, CONFIG, lambda _: 1.0) == ()
    assert health.hung(PoolState((msgspec.structs.replace(one, phase="active"),)), 10.0, CONFIG, never) == ()


def test_calls_without_a_first_token_are_ended_sooner_if_others_can_take_them() -> None:
    one = Endpoint(address="t0", phase="ejected", open_since=(0.0,))
    assert health.hung(PoolState((one, Endpoint(address="t1"))), 2.0, CONFIG, never, begun=False) == ("t0",)
    assert health.hung(PoolState((one, Endpoint(address="t1"))), 1.9, CONFIG, never, begun=False) == ()
    assert health.hung(PoolState((one,)), 2.0, CONFIG, never, begun=False) == ()


# --- membership ------------------------------------------------------------------------------------------------------


def test_first_endpoints_are_active_and_later_ones_are_probed() -> None:
    state = health.with_endpoints(PoolState(), {"t0": "a"}, 0.0)
    assert [(one.address, one.phase, one.zone) for one in state.endpoints] == [("t0", "active", "a")]
    state = health.with_endpoints(state, {"t0": "b", "t1": ""}, 1.0)
    assert [(one.address, one.phase, one.zone) for one in state.endpoints] == [
        ("t0", "active", "b"),
        ("t1", "ejected", ""),
    ]
    assert health.due_probes(state, 1.0, CONFIG, never)[1] == ("t1",)


def test_an_unlisted_endpoint_drains_until_its_last_call() -> None:
    state = pool(2).replace(Endpoint(address="t0", open_since=(0.0, 0.0)))
    state = health.with_endpoints(state, {"t1": ""}, 1.0)
    assert state.endpoints[0].phase == "draining"
    assert health.without_drained(state) == state
    state = health.without_drained(state.replace(msgspec.structs.replace(state.endpoints[0], open_since=())))
    assert [one.address for one in state.endpoints] == ["t1"]


def test_an_unlisted_idle_endpoint_is_removed_at_once() -> None:
    assert [one.address for one in health.with_endpoints(pool(2), {"t1": ""}, 1.0).endpoints] == ["t1"]


def test_a_relisted_endpoint_is_probed_first() -> None:
    state = health.with_endpoints(pool(2).replace(Endpoint(address="t0", open_since=(0.0,))), {"t1": ""}, 1.0)
    state = health.with_endpoints(state, {"t0": "", "t1": ""}, 2.0)
    assert (state.endpoints[0].phase, state.endpoints[0].outstanding) == ("ejected", 1)
    assert health.due_probes(state, 2.0, CONFIG, never)[1] == ("t0",)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("fail"), st.integers(0, 3), st.sampled_from([REFUSED, RAISED, LATE])),
            st.tuples(st.just("probe"), st.integers(0, 3), st.sampled_from(["healthy", "dead", "silent", "busy"])),
            st.tuples(st.just("name"), st.sets(st.integers(0, 3), min_size=1), st.none()),
            st.tuples(st.just("due"), st.integers(0, 3), st.none()),
        ),
        max_size=40,
    )
)
def test_any_events_keep_exactly_the_listed_endpoints(events: list[tuple[str, object, object]]) -> None:
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
