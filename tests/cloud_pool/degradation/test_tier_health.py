"""A tier's share of the work, under a fake clock: lowered under stress, restored when stable, without flapping."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from causeway_server.cloud_pool.degradation.config import ShareRamp
from causeway_server.cloud_pool.degradation.tier_health import (
    FULL_SHARE,
    Stress,
    TierHealth,
    TierSnapshot,
    caller_position,
    next_tier_health,
    offer_share,
    stress_of,
)

SHARE_RAMP = ShareRamp(stable_for_s=1.0, step_interval_s=0.25, decrease_factor=0.7, increase_step=0.2, min_share=0.05)
IDLE, BUSY = TierSnapshot("a"), TierSnapshot("a", busy=0.9)
STRESSES: list[Stress] = ["", "broken", "saturated", "slow"]


def after(tier_health: TierHealth, stress: Stress, times: list[float], view: TierSnapshot = IDLE) -> TierHealth:
    for now in times:
        tier_health = next_tier_health(tier_health, stress, view, SHARE_RAMP, now)
    return tier_health


def every(start: float, end: float, step: float = 0.05) -> list[float]:
    return [start + step * n for n in range(round((end - start) / step) + 1)]


def test_a_healthy_tier_keeps_its_share() -> None:
    assert after(FULL_SHARE, "", every(0.0, 10.0)) == FULL_SHARE


def test_stress_lowers_the_share_step_by_step() -> None:
    assert after(FULL_SHARE, "saturated", [0.0]).share == SHARE_RAMP.decrease_factor
    assert after(FULL_SHARE, "saturated", every(0.0, 1.9)).share == SHARE_RAMP.decrease_factor
    assert after(FULL_SHARE, "slow", [0.0, 2.0]).share == SHARE_RAMP.decrease_factor**2
    assert after(FULL_SHARE, "slow", every(0.0, 60.0)).share == SHARE_RAMP.min_share


def test_a_broken_tier_gets_nothing_at_once() -> None:
    assert after(FULL_SHARE, "broken", [0.0]).share == 0.0
    assert not any(offer_share(after(FULL_SHARE, "broken", [0.0]), n / 9)[0] for n in range(9))


def test_the_share_returns_step_by_step_after_a_stable_time() -> None:
    down = after(FULL_SHARE, "broken", [0.0])
    shares = [round(after(down, "", every(0.01, end)).share, 6) for end in (0.99, 1.2, 1.26, 1.51, 1.76, 2.01, 2.26)]
    assert shares == [0.0, 0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert after(down, "", every(0.01, 2.5)).stress == ""


def test_displaced_work_moves_each_step_interval() -> None:
    queue, tier_health = TierSnapshot("a", queue_s=1.5), FULL_SHARE
    for now in every(0.0, 0.55):
        tier_health = next_tier_health(tier_health, "saturated", queue, SHARE_RAMP, now, is_displaced=True)
    assert tier_health.share == SHARE_RAMP.decrease_factor**3


def test_a_busy_tier_returns_slowly() -> None:
    down = after(FULL_SHARE, "saturated", every(0.0, 10.0))
    assert after(down, "", every(10.01, 12.9), BUSY).share == down.share
    assert after(down, "", every(10.01, 13.1), BUSY).share == down.share / SHARE_RAMP.decrease_factor
    assert after(down, "", every(10.01, 16.2), BUSY).share == down.share / SHARE_RAMP.decrease_factor**2
    assert after(down, "", every(10.01, 80.0), BUSY).share == 1.0
    assert after(down, "", every(10.01, 13.1), IDLE).share == 1.0


def test_time_without_requests_counts() -> None:
    assert after(after(FULL_SHARE, "broken", [0.0]), "", [60.0]).share == 1.0


def test_a_relapse_restarts_the_stable_time() -> None:
    half = after(after(FULL_SHARE, "broken", [0.0]), "", every(0.01, 1.76))
    relapsed = after(half, "saturated", [2.0])
    assert relapsed.share < half.share
    assert after(relapsed, "", every(2.01, 3.2)).share == relapsed.share


def test_an_oscillating_load_does_not_flap() -> None:
    tier_health, shares = FULL_SHARE, []
    for now in every(0.0, 60.0):
        tier_health = next_tier_health(tier_health, "saturated" if now % 1.0 < 0.5 else "", IDLE, SHARE_RAMP, now)
        shares.append(tier_health.share)
    assert all(later <= earlier for earlier, later in itertools.pairwise(shares))
    assert shares[-1] == SHARE_RAMP.min_share


def test_a_slow_swing_turns_the_share_once_each_way() -> None:
    tier_health, turns, was = FULL_SHARE, [], 1.0
    for now in every(0.0, 79.9):
        tier_health = next_tier_health(tier_health, "slow" if now % 20.0 < 10.0 else "", IDLE, SHARE_RAMP, now)
        if tier_health.share != was:
            turns.append(tier_health.share > was)
        was = tier_health.share
    assert [up for up, _ in itertools.groupby(turns)] == [False, True] * 4


def test_the_share_returns_as_far_as_there_is_room() -> None:
    down = after(FULL_SHARE, "broken", [0.0])
    assert (
        after(down, "", every(0.01, 4.0), TierSnapshot("a", fitting_share=0.0)).share
        < SHARE_RAMP.min_share / SHARE_RAMP.decrease_factor**2
    )
    roomy = after(down, "", [2.01], TierSnapshot("a", fitting_share=0.5))
    assert roomy.share == 0.5


def test_each_relapse_doubles_the_pause() -> None:
    tier_health, tight, tries = after(FULL_SHARE, "saturated", every(0.0, 6.0)), TierSnapshot("a", busy=0.9), []
    for now in every(6.0, 400.0, 0.25):
        was = tier_health.share
        tier_health = next_tier_health(tier_health, "", tight, SHARE_RAMP, now)
        if tier_health.share > was:
            tries.append(now)
            tier_health = next_tier_health(tier_health, "saturated", tight, SHARE_RAMP, now + 0.2)
    pauses = [later - sooner for sooner, later in itertools.pairwise(tries)]
    assert all(later >= sooner - 0.3 for sooner, later in itertools.pairwise(pauses))
    assert pauses[0] < 2 * 2 * SHARE_RAMP.busy_step_interval_s
    assert SHARE_RAMP.max_backoff_s <= pauses[-1] <= SHARE_RAMP.max_backoff_s + 1.0


def test_after_the_load_relapses_do_not_matter() -> None:
    tier_health = TierHealth(share=0.2, stress="saturated", stressed_at=0.0, stepped_at=0.0, ceiling=0.5, relapses=6)
    assert after(tier_health, "", every(0.05, 2.5), TierSnapshot("a", fitting_share=9.0)).share == 1.0
    assert (
        after(tier_health, "", every(0.05, 50.0), TierSnapshot("a", fitting_share=1.0)).share
        == 0.5 * SHARE_RAMP.decrease_factor
    )


def test_below_the_ceiling_the_share_returns_fast() -> None:
    tier_health = TierHealth(share=0.3, stress="saturated", stressed_at=0.0, stepped_at=0.0, ceiling=1.0, relapses=6)
    assert after(tier_health, "", every(0.05, 3.1), BUSY).share == 0.3 / SHARE_RAMP.decrease_factor
    assert after(tier_health, "", every(0.05, 6.2), BUSY).share == pytest.approx(0.3 / SHARE_RAMP.decrease_factor**2)
    assert after(tier_health, "", every(0.05, 55.0), BUSY).share < 1.0


def test_no_further_step_while_the_queue_shrinks() -> None:
    queue = [3.0 - 0.4 * n for n in range(7)]
    tier_health = FULL_SHARE
    for at, queue_s in enumerate(queue):
        tier_health = next_tier_health(
            tier_health, "saturated", TierSnapshot("a", queue_s=queue_s), SHARE_RAMP, at * 2.0
        )
    assert tier_health.share == SHARE_RAMP.decrease_factor
    standing = after(FULL_SHARE, "saturated", [0.0, 2.0, 4.0], TierSnapshot("a", queue_s=3.0))
    assert standing.share == SHARE_RAMP.decrease_factor**3


def test_relapses_expire() -> None:
    tier_health = TierHealth(stressed_at=0.0, stepped_at=1.0, relapses=6)
    assert next_tier_health(tier_health, "saturated", BUSY, SHARE_RAMP, 30.0).relapses == 7
    assert next_tier_health(tier_health, "saturated", BUSY, SHARE_RAMP, 90.0).relapses == 1


@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.sampled_from(STRESSES)), max_size=60))
def test_any_events_keep_the_share_within_bounds(steps: list[tuple[float, Stress]]) -> None:
    tier_health, now, stressed_at = FULL_SHARE, 0.0, float("-inf")
    for wait, stress in steps:
        now += wait
        was, tier_health = tier_health, next_tier_health(tier_health, stress, IDLE, SHARE_RAMP, now)
        assert 0.0 <= tier_health.share <= 1.0
        if stress == "broken":
            assert tier_health.share == 0.0
        elif stress:
            assert min(was.share, SHARE_RAMP.min_share) <= tier_health.share <= was.share
        elif tier_health.share > was.share:
            assert now - stressed_at >= SHARE_RAMP.stable_for_s
        if stress:
            stressed_at = now


def spread(share: float, places: list[float], tier_health: TierHealth = FULL_SHARE) -> tuple[list[bool], TierHealth]:
    """Return which of these requests, in this order, are offered the tier."""
    tier_health, taken = TierHealth(share=share, credit=tier_health.credit), []
    for place in places:
        takes, tier_health = offer_share(tier_health, place)
        taken.append(takes)
    return taken, tier_health


@given(st.floats(0.01, 1.0), st.lists(st.floats(0.0, 1.0, exclude_max=True), min_size=1, max_size=30))
def test_the_share_holds_over_any_callers(share: float, callers: list[float]) -> None:
    taken, _ = spread(share, callers * 40)
    assert abs(sum(taken) - share * len(taken)) <= 34.0


def test_a_single_caller_is_spread_evenly() -> None:
    taken, _ = spread(0.5, [0.8] * 400)
    assert [sum(taken[at : at + 10]) for at in range(200, 400, 10)] == [5] * 20


def test_callers_keep_their_tier_while_the_share_is_constant() -> None:
    """When the share falls, only those across its end move; when it rises again, the same come back."""
    chance = random.Random(1)
    tier_health, seen = FULL_SHARE, []
    for share in (0.7, 0.5, 0.7):
        order = [chance.randrange(100) for _ in range(3000)]
        taken, tier_health = spread(share, [(one + 0.5) / 100 for one in order], tier_health)
        tiers: dict[int, list[bool]] = {one: [] for one in range(100)}
        for one, takes in zip(order[500:], taken[500:], strict=True):
            tiers[one].append(takes)
        seen.append({one: sum(found) / len(found) for one, found in tiers.items()})
    for share, shares in zip((0.7, 0.5, 0.7), seen, strict=True):
        assert all(found == 1.0 for one, found in shares.items() if one / 100 < share - 0.16)
        assert all(found == 0.0 for one, found in shares.items() if one / 100 > share + 0.16)
        assert sum(min(found, 1.0 - found) for found in shares.values()) < 8.0
    assert sum(round(one) != round(other) for one, other in zip(seen[0].values(), seen[2].values(), strict=True)) <= 4


def test_a_relapse_restores_the_share_before() -> None:
    """The next step goes half as far, and so on, until the ceiling itself is tried again."""
    tight, tier_health = (
        TierSnapshot("a", busy=0.9),
        TierHealth(share=0.5, stress="saturated", stressed_at=0.0, stepped_at=0.0),
    )
    shares, now, load = [], 0.0, 0.6
    while now < 400.0:
        now += 0.25
        was = tier_health.share
        tier_health = next_tier_health(
            tier_health, "saturated" if tier_health.share > load else "", tight, SHARE_RAMP, now
        )
        if tier_health.share != was:
            shares.append(round(tier_health.share, 3))
    assert shares[:4] == [0.714, 0.5, 0.607, 0.5]
    assert all(share <= 0.715 for share in shares)
    assert len(shares) <= 24
    tier_health = TierHealth(share=0.6, ceiling=0.61, relapses=6, stress="saturated", stressed_at=0.0, stepped_at=0.0)
    assert after(tier_health, "", every(0.05, 61.0), tight).share == 0.61
    assert after(tier_health, "", every(0.05, 121.0), tight).share > 0.61


def test_stress_precedence() -> None:
    assert stress_of(TierSnapshot("a", broken=True, saturated=True), FULL_SHARE) == "broken"
    assert stress_of(TierSnapshot("a", saturated=True, ttft_s=9.0, objective_s=1.0), FULL_SHARE) == "saturated"
    assert stress_of(TierSnapshot("a", ttft_s=1.1, objective_s=1.0), FULL_SHARE) == "slow"
    assert stress_of(TierSnapshot("a", ttft_s=1.0, objective_s=1.0), FULL_SHARE) == ""
    assert stress_of(TierSnapshot("a", ttft_s=9.0), FULL_SHARE) == ""
    assert stress_of(TierSnapshot("a", objective_s=1.0), FULL_SHARE) == ""


def test_a_slow_tier_must_become_clearly_faster() -> None:
    almost = TierSnapshot("a", ttft_s=0.9, objective_s=1.0)
    assert stress_of(almost, TierHealth(share=0.5, stress="slow")) == "slow"
    assert stress_of(TierSnapshot("a", ttft_s=0.79, objective_s=1.0), TierHealth(share=0.5, stress="slow")) == ""


# --- positions -------------------------------------------------------------------------------------------------------


def test_a_device_or_else_a_conversation_has_one_position() -> None:
    assert caller_position("acme", "kiosk", b"a") == caller_position("acme", "kiosk", b"b")
    assert caller_position("acme", "kiosk", b"a") != caller_position("acme", "till", b"a")
    assert caller_position("acme", "kiosk", b"a") != caller_position("other", "kiosk", b"a")
    assert caller_position("acme", "", b"a") == caller_position("other", "", b"a") != caller_position("acme", "", b"b")


def test_positions_are_spread_evenly() -> None:
    positions = [caller_position("acme", f"kiosk-{number}", b"") for number in range(2000)]
    assert all(0.0 <= position < 1.0 for position in positions)
    for share in (0.1, 0.5, 0.9):
        assert abs(sum(position < share for position in positions) / 2000 - share) < 0.04
