"""Which endpoints are slow, how soon that is detected, and how they return: pure, time is an argument."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from causeway_server.cloud_pool.dispatch import health
from causeway_server.cloud_pool.dispatch.config import LoadBalancingConfig
from causeway_server.cloud_pool.dispatch.endpoint_selection import (
    LATE_LIMIT,
    SLOW,
    Endpoint,
    PoolState,
    choose,
    first_token_measured,
    is_slow,
    late_after_s,
    median_ttft_s,
    probe_measured,
    slowness,
    wait_abandoned,
)

CONFIG = LoadBalancingConfig()
NOW = 1000.0
USUAL_S = 0.2


def pool(*ttft_s: float, spread_s: float = 0.0) -> PoolState:
    return PoolState(
        tuple(
            Endpoint(address=f"t{at}", ttft_s=seconds, ttft_at=NOW, spread_s=spread_s)
            for at, seconds in enumerate(ttft_s)
        )
    )


def healthy() -> PoolState:
    return pool(USUAL_S, USUAL_S, USUAL_S)


def of(state: PoolState, address: str = "t0") -> Endpoint:
    one = state.get(address)
    assert one is not None
    return one


def changed(state: PoolState, address: str = "t0", **changes: object) -> PoolState:
    return state.replace(msgspec.structs.replace(of(state, address), **changes))


def slowed(state: PoolState, *, now: float = NOW) -> PoolState:
    """`t0` after as many answers of two seconds as it takes."""
    for _ in range(LATE_LIMIT):
        state = first_token_measured(state, "t0", 2.0, now, CONFIG)
    return state


def chosen(state: PoolState, now: float = NOW, times: int = 300) -> set[str]:
    chance = random.Random(1)
    found = (choose(state, CONFIG, now=now, draw=chance.random()) for _ in range(times))
    return {one.address for one in found if one is not None}


def due_probes(state: PoolState, now: float) -> tuple[str, ...]:
    return health.due_probes(state, now, CONFIG, lambda address: now)[1]


def probed(state: PoolState, seconds: float, now: float) -> PoolState:
    return health.probe_finished(state, "t0", "healthy", "", now, CONFIG, took_s=seconds)


# --- late ------------------------------------------------------------------------------------------------------------


def test_the_late_threshold_follows_the_spread() -> None:
    assert late_after_s(healthy(), NOW) < 2.0 * USUAL_S
    assert late_after_s(pool(USUAL_S, USUAL_S, spread_s=0.2), NOW) >= USUAL_S + 4 * 0.2
    assert late_after_s(pool(0.0, 0.0), NOW) == math.inf


def test_one_stalling_endpoint_does_not_raise_the_late_threshold() -> None:
    assert late_after_s(changed(healthy(), spread_s=9.0), NOW) == late_after_s(healthy(), NOW)


def test_an_endpoint_is_avoided_once_a_first_token_is_late() -> None:
    late_s = late_after_s(healthy(), NOW)
    for waited, avoided in ((0.9 * late_s, False), (1.1 * late_s, True)):
        stuck = changed(healthy(), open_since=(NOW - waited,), waiting_since=(NOW - waited,))
        stuck = changed(changed(stuck, "t1", open_since=(NOW,) * 2), "t2", open_since=(NOW,) * 2)
        assert ("t0" not in chosen(stuck)) == avoided


def test_an_abandoned_late_call_counts_as_slow() -> None:
    state = healthy()
    for _ in range(2):
        state = wait_abandoned(state, "t0", 0.5, NOW, CONFIG)
    assert "t0" not in chosen(state)
    assert wait_abandoned(healthy(), "t0", 0.1, NOW, CONFIG) == healthy(), "an early end says nothing"


# --- slow ------------------------------------------------------------------------------------------------------------


def test_late_first_tokens_in_a_row_make_an_endpoint_slow() -> None:
    state = healthy()
    for _ in range(4):
        for seconds in (2.0, 2.0, USUAL_S):
            state = first_token_measured(state, "t0", seconds, NOW, CONFIG)
    assert not of(state).slow
    assert of(slowed(state)).slow


@given(st.lists(st.sampled_from([0.2, 2.0]), min_size=30, max_size=200), st.integers(0, 2**16))
def test_mixed_prompts_never_leave_a_pool_without_a_trusted_endpoint(lengths: list[float], seed: int) -> None:
    state, chance = healthy(), random.Random(seed)
    for seconds in lengths:
        state = first_token_measured(state, f"t{chance.randrange(3)}", seconds, NOW, CONFIG)
    assert choose(state, CONFIG, now=NOW, draw=0.5) is not None
    assert not all(is_slow(state, one, NOW, CONFIG) for one in state.endpoints)


def test_a_slow_endpoint_gets_probes_only_and_does_not_fade() -> None:
    assert "t0" not in chosen(slowed(healthy()), now=NOW + 600.0)
    assert "t0" in chosen(first_token_measured(healthy(), "t0", 2.0, NOW, CONFIG), now=NOW + 600.0)


def test_a_slow_endpoint_helps_when_the_others_are_overloaded() -> None:
    state = slowed(healthy())
    for address in ("t1", "t2"):
        state = changed(state, address, open_since=(NOW,) * 60)
    assert "t0" in chosen(state)


def test_a_slow_endpoint_is_probed_until_it_is_as_fast_as_its_peers() -> None:
    state, now = slowed(healthy()), NOW
    assert due_probes(state, now) == ("t0",)
    pauses = []
    for _ in range(4):
        state = probed(state, 1.2, now)
        assert of(state).slow
        pauses.append(of(state).not_before - now)
        assert due_probes(state, of(state).not_before - 0.01) == ()
        now = of(state).not_before
        assert due_probes(state, now) == ("t0",)
    assert pauses == [1.0, 2.0, 2.0, 2.0]
    state = first_token_measured(probed(state, USUAL_S, now), "t0", USUAL_S, now, CONFIG)
    assert not of(state).slow


def test_an_endpoint_marked_slow_by_mistake_gets_its_share_back_at_once() -> None:
    state = first_token_measured(probed(slowed(healthy()), USUAL_S, NOW), "t0", USUAL_S, NOW, CONFIG)
    assert not of(state).slow
    assert "t0" in chosen(state)


def test_after_a_fast_probe_exactly_one_trial_request_goes_there() -> None:
    state = probed(slowed(healthy()), USUAL_S, NOW)
    assert due_probes(state, NOW + 5.0) == ()
    assert chosen(state) == {"t0"}
    assert "t0" not in chosen(changed(state, open_since=(NOW,), waiting_since=(NOW,)))
    again = choose(state, CONFIG, now=NOW, draw=0.0, excluding=["t1"])
    assert again is not None
    assert again.address == "t2", "a second try wants an answer"
    assert "t0" not in chosen(first_token_measured(state, "t0", 2.0, NOW, CONFIG))
    assert "t0" not in chosen(wait_abandoned(state, "t0", 2.0, NOW, CONFIG))
    left = wait_abandoned(state, "t0", USUAL_S / 2, NOW, CONFIG)
    assert chosen(left) == {"t0"}, "its caller left too soon to tell"


def test_each_slow_relapse_doubles_the_pause() -> None:
    """It is fast for probes and slow for requests."""
    state, now, pauses = slowed(healthy()), NOW, []
    for _ in range(8):
        pauses.append(of(state).not_before - now)
        assert due_probes(state, of(state).not_before - 0.01) == ()
        if pauses[-1] > 0.0:
            assert of(probed(state, USUAL_S, now)).trust == "slow"
        now = of(state).not_before
        assert due_probes(state, now) == ("t0",)
        state = probed(state, USUAL_S, now)
        assert of(state).trust == "on_trial"
        state = first_token_measured(state, "t0", 2.0, now, CONFIG)
    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0]
    state = first_token_measured(
        probed(state, USUAL_S, of(state).not_before), "t0", USUAL_S, of(state).not_before, CONFIG
    )
    later = of(state).not_before + CONFIG.max_ejection_s
    assert of(slowed(state, now=later)).not_before == later


def test_a_fast_answer_alone_does_not_restore_trust() -> None:
    state = first_token_measured(slowed(healthy()), "t0", USUAL_S, NOW, CONFIG)
    assert of(state).trust == "slow"
    assert due_probes(state, NOW) == ("t0",)


def test_an_ejected_endpoint_with_a_slow_probe_returns_as_slow() -> None:
    away = changed(healthy(), phase="ejected", not_before=NOW, last_error="deadline_exceeded")
    for seconds, remains in ((1.2, True), (USUAL_S, False)):
        state = probed(away, seconds, NOW)
        assert of(state).phase == "active"
        assert (is_slow(state, of(state), NOW + 60.0, CONFIG), of(state).slow) == (remains, remains)
    assert of(probed(changed(pool(0.0), phase="ejected"), 5.0, NOW)).slow is False, "there is no peer to compare with"


@given(
    st.lists(
        st.tuples(st.sampled_from(["first", "abandoned", "probe"]), st.integers(0, 2), st.floats(0.0, 20.0)),
        max_size=60,
    )
)
def test_slowness_is_bounded(events: Sequence[tuple[str, int, float]]) -> None:
    """Whatever was measured: from 1 to 7, at least SLOW for a slow endpoint, and an endpoint is always chosen."""
    state = healthy()
    for at, (what, which, seconds) in enumerate(events):
        now, address = NOW + at, f"t{which}"
        if what == "first":
            state = first_token_measured(state, address, seconds, now, CONFIG)
        elif what == "abandoned":
            state = wait_abandoned(state, address, seconds, now, CONFIG)
        else:
            state = probe_measured(state, address, seconds, now, CONFIG)
        median_s, late_s = median_ttft_s(state, now), late_after_s(state, now)
        for one in state.endpoints:
            times = slowness(one, median_s, late_s, now, CONFIG)
            assert (SLOW if one.slow else 1.0) <= times <= 7.0
        assert choose(state, CONFIG, now=now, draw=0.3) is not None
