"""Selection of an endpoint: pure functions."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from causeway_server.cloud_pool.dispatch.config import LoadBalancingConfig
from causeway_server.cloud_pool.dispatch.endpoint_selection import (
    Endpoint,
    PoolState,
    Prompt,
    choose,
    draw_two,
    prefix_key,
)
from causeway_server.router.types import Message, Request

DRAWS = st.floats(0.0, 1.0, exclude_max=True)
LOADS = st.lists(st.integers(0, 9), min_size=1, max_size=6)
CONFIG = LoadBalancingConfig()
NOW = 1000.0


def pool(*outstanding: int, zones: Sequence[str] = ()) -> PoolState:
    return PoolState(
        tuple(
            Endpoint(address=f"t{at}:1", open_since=(NOW,) * load, zone=zones[at] if zones else "")
            for at, load in enumerate(outstanding)
        )
    )


def changed(state: PoolState, at: int, **changes: object) -> PoolState:
    return state.replace(msgspec.structs.replace(state.endpoints[at], **changes))


def taken(state: PoolState, chosen: Endpoint) -> PoolState:
    return state.replace(msgspec.structs.replace(chosen, open_since=(*chosen.open_since, NOW)))


def shares(state: PoolState, times: int = 2000, **how: object) -> Counter[str]:
    """Return the shares of requests that end at once, so that only the work in `state` is outstanding."""
    chance = random.Random(7)
    found: Counter[str] = Counter()
    for _ in range(times):
        chosen = choose(state, CONFIG, now=NOW, draw=chance.random(), **how)  # type: ignore[arg-type]
        assert chosen is not None
        found[chosen.address] += 1
    return found


# --- two choices -----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 9), min_size=2, max_size=6), DRAWS)
def test_the_single_busiest_endpoint_is_never_chosen(loads: list[int], draw: float) -> None:
    chosen = choose(pool(*loads), CONFIG, now=NOW, draw=draw)
    assert chosen is not None
    assert loads.count(max(loads)) > 1 or chosen.outstanding < max(loads)


@given(LOADS, DRAWS, st.sets(st.integers(0, 5)))
def test_excluded_endpoints_are_not_chosen(loads: list[int], draw: float, out: set[int]) -> None:
    excluding = {f"t{at}:1" for at in out}
    chosen = choose(pool(*loads), CONFIG, now=NOW, draw=draw, excluding=excluding, prompt=prompt())
    assert (chosen is None) == (set(range(len(loads))) <= out)
    assert chosen is None or chosen.address not in excluding


@given(
    st.lists(st.sampled_from(["active", "ejected", "draining"]), min_size=1, max_size=6), DRAWS, st.binary(max_size=4)
)
def test_only_active_endpoints_are_chosen(phases: list[str], draw: float, key: bytes) -> None:
    state = PoolState(tuple(Endpoint(address=f"t{at}:1", phase=each) for at, each in enumerate(phases)))  # type: ignore[arg-type]
    chosen = choose(state, CONFIG, now=NOW, draw=draw, prompt=prompt(key))
    assert (chosen is None) == ("active" not in phases)
    assert chosen is None or chosen.phase == "active"


@given(st.integers(2, 9), DRAWS)
def test_draw_two_returns_two_different_endpoints(count: int, draw: float) -> None:
    one, other = draw_two(pool(*[0] * count).endpoints, draw)
    assert one.address != other.address


def test_equal_endpoints_get_equal_shares() -> None:
    found = shares(pool(0, 0, 0, 0), times=8000)
    assert all(abs(count - 2000) < 200 for count in found.values()), found


@settings(deadline=None, max_examples=20)
@given(st.integers(2, 8), st.integers(0, 2**32))
def test_long_running_work_is_balanced(count: int, seed: int) -> None:
    """With two choices, no endpoint has more than a few requests over the mean (ln ln n, and a constant)."""
    chance, state = random.Random(seed), pool(*[0] * count)
    for _ in range(100 * count):
        chosen = choose(state, CONFIG, now=NOW, draw=chance.random())
        assert chosen is not None
        state = taken(state, chosen)
    assert max(one.outstanding for one in state.endpoints) <= 100 + 5


# --- slowness --------------------------------------------------------------------------------------------------------


def timed(*ttft_s: float) -> PoolState:
    state = pool(*[0] * len(ttft_s))
    for at, seconds in enumerate(ttft_s):
        state = changed(state, at, ttft_s=seconds, ttft_at=NOW)
    return state


def test_a_slow_endpoint_is_left_alone_while_others_have_room() -> None:
    """Ten times slower is worse than ten times the work, and better than no endpoint."""
    state = timed(0.05, 0.5, 0.05)
    assert "t1:1" not in shares(state)
    busy = changed(changed(state, 0, open_since=(NOW,) * 12), 2, open_since=(NOW,) * 12)
    assert "t1:1" not in shares(busy)
    busy = changed(changed(state, 0, open_since=(NOW,) * 50), 2, open_since=(NOW,) * 50)
    assert "t1:1" in shares(busy)


def test_two_slow_endpoints_are_never_drawn_together_while_others_have_room() -> None:
    assert not shares(timed(0.5, 0.5, 0.5, 0.05, 0.05, 0.05, 0.05)).keys() & {"t0:1", "t1:1", "t2:1"}


def test_slowness_is_known_in_a_pool_of_two() -> None:
    """The lower median of two is the faster one."""
    assert set(shares(timed(0.5, 0.05))) == {"t1:1"}


def test_twice_the_median_is_not_slow() -> None:
    assert set(shares(timed(0.05, 0.1, 0.08))) == {"t0:1", "t1:1", "t2:1"}


def test_measured_slowness_fades_without_requests() -> None:
    state = timed(0.05, 0.5, 0.05)
    later = [at for at in range(0, 200, 5) if choose(state, CONFIG, now=NOW + at, draw=0.4) == state.endpoints[1]]
    assert later
    assert 30 < min(later) < 120


def test_an_endpoint_with_a_late_first_token_is_avoided_before_it_answers() -> None:
    state = timed(0.05, 0.05, 0.05)
    stuck = changed(state, 1, open_since=(NOW - 1.0,), waiting_since=(NOW - 1.0,))
    others = changed(changed(stuck, 0, open_since=(NOW,) * 4), 2, open_since=(NOW,) * 4)
    assert "t1:1" not in shares(others)


# --- zones -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from("ab")), min_size=1, max_size=6), DRAWS)
def test_other_zones_help_only_when_the_own_zone_is_saturated(endpoints: list[tuple[int, str]], draw: float) -> None:
    state = pool(*(load for load, _ in endpoints), zones=[zone for _, zone in endpoints])
    chosen = choose(state, CONFIG, now=NOW, draw=draw, zone="a")
    roomy = [one for one in state.endpoints if one.zone == "a" and one.outstanding < CONFIG.zone_spill_requests]
    assert chosen is not None
    if roomy:
        assert chosen in roomy
    assert choose(state, CONFIG, now=NOW, draw=draw, zone="c") is not None


def test_spilled_work_is_balanced_by_load() -> None:
    found = shares(pool(16, 16, 3, 3, zones="aabb"), zone="a")
    assert found["t2:1"] > 700
    assert found["t3:1"] > 700


# --- warm prefixes ---------------------------------------------------------------------------------------------------


def prompt(key: bytes = b"k", tokens: int = 1000) -> Prompt:
    return Prompt(tokens, key, blocks=(1, 2, 3))


def test_a_prompt_goes_where_most_of_it_is_cached() -> None:
    cached = {"t0:1": 500, "t1:1": 900, "t2:1": 700}
    assert shares(pool(0, 0, 0, 0), 20, prompt=prompt(), cached=cached).keys() == {"t1:1"}


@pytest.mark.parametrize(("load", "address"), [(2, "t1:1"), (3, "t0:1")])
def test_cached_tokens_make_up_for_open_requests_up_to_their_weight(load: int, address: str) -> None:
    """The second endpoint has at least 300 tokens more than its peer's presumed 700, and an open request weighs 200."""
    cached = {"t0:1": 600, "t1:1": 1000 + 100}
    assert shares(pool(0, load), 20, prompt=prompt(tokens=1100), cached=cached).keys() == {address}


@settings(deadline=None)
@given(LOADS, st.lists(st.binary(min_size=1, max_size=8), min_size=1, max_size=40), DRAWS)
def test_no_load_grows_beyond_what_the_prompt_is_worth(loads: list[int], keys: list[bytes], draw: float) -> None:
    """An endpoint is never chosen that has more requests in addition to the least loaded one than the prompt weighs."""
    state = pool(*loads)
    for key in keys:
        chosen = choose(state, CONFIG, now=NOW, draw=draw, prompt=prompt(key), cached={"t0:1": 1000})
        assert chosen is not None
        least = min(one.outstanding for one in state.endpoints)
        assert chosen.outstanding - least <= 1000 / CONFIG.load_tokens
        state = taken(state, chosen)


@given(st.binary(min_size=1, max_size=8), st.integers(2, 8))
def test_an_ejected_endpoint_moves_only_its_own_conversations(key: bytes, count: int) -> None:
    state = pool(*[0] * count)
    home = choose(state, CONFIG, now=NOW, draw=0.0, prompt=prompt(key))
    assert home is not None
    for at, one in enumerate(state.endpoints):
        moved = choose(changed(state, at, phase="ejected"), CONFIG, now=NOW, draw=0.0, prompt=prompt(key))
        assert moved is not None
        if one.address != home.address:
            assert moved.address == home.address


def test_new_conversations_are_spread_evenly() -> None:
    homes = Counter[str]()
    for number in range(4000):
        chosen = choose(pool(0, 0, 0, 0), CONFIG, now=NOW, draw=0.0, prompt=prompt(str(number).encode()))
        assert chosen is not None
        homes[chosen.address] += 1
    assert all(700 < count < 1300 for count in homes.values()), homes


def test_gateways_that_know_nothing_of_each_other_choose_the_same_home() -> None:
    """A beginning that another endpoint has, such as a system prompt, does not outweigh the home's share."""
    home = choose(pool(0, 0, 0, 0), CONFIG, now=NOW, draw=0.0, prompt=prompt())
    assert home is not None
    other = next(one.address for one in pool(0, 0, 0, 0).endpoints if one.address != home.address)
    assert choose(pool(0, 0, 0, 0), CONFIG, now=NOW, draw=0.9, prompt=prompt(), cached={other: 500}) == home


def test_a_conversation_leaves_a_slow_endpoint() -> None:
    state = timed(0.05, 0.05, 0.05)
    slow = changed(state, 1, ttft_s=0.5)
    assert shares(slow, 20, prompt=prompt(), cached={"t1:1": 1000}).keys() <= {"t0:1", "t2:1"}


def chat(*texts: str) -> Request:
    roles = ["system", *["user", "assistant"] * len(texts)]
    return Request(kind="chat", model="m", messages=tuple(map(Message, roles, texts)))


def test_the_key_covers_system_prompt_and_first_turn_only() -> None:
    assert prefix_key(chat("be kind", "hi")) == prefix_key(chat("be kind", "hi", "hello", "how are you?"))
    assert prefix_key(chat("be kind", "hi")) != prefix_key(chat("be kind", "ho"))
    assert prefix_key(chat("be kind", "hi")) != prefix_key(chat("be rude", "hi"))


def test_the_key_of_a_plain_prompt_covers_its_head_only() -> None:
    head = "x" * 2000
    keys = [prefix_key(Request(kind="completion", model="m", prompts=(head + end,))) for end in ("", "a", "b")]
    assert len(set(keys)) == 1
    assert keys[0] != prefix_key(Request(kind="completion", model="m", prompts=("y",)))
    assert prefix_key(Request(kind="completion", model="m", prompts=((1, 2),)))
