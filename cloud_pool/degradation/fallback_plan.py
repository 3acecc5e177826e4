"""The tiers' states and footings → the rungs of one request, in order, each with its why. Pure.

1. tiers at or below the one asked for that are well enough and offer this request a place, best first
2. those that hold it back (their share is cut): better than a refusal, if all of (1) refuse
3. nobody but broken ones: they are asked all the same, for what looks broken may just have come back
4. when every tier that lives is under stress, answers that can be continued are cut short
5. who stays has one rung: the tier it asked for, whatever its state
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from .config import ShareRamp
from .tier_health import FULL_SHARE, Stress, TierHealth, TierSnapshot, next_tier_health, offered, stress_of

REQUESTED = "requested"


class FallbackRequest(msgspec.Struct, frozen=True):
    tier: str
    left_s: float
    place: float = 0.5  # its caller's in the line, 0 to 1
    stays: bool = False  # this tier or none
    resumable: bool = False  # a shortened answer could be continued as if it had never been cut


class FallbackStep(msgspec.Struct, frozen=True):
    tier: str
    above: tuple[tuple[str, Stress], ...] = ()  # the tiers that stand above it, and what was wrong with them
    cut: bool = False  # its answer is shortened
    last: bool = False  # nobody is left to take over: it has all the time there is
    forced: bool = False  # tried though it seems broken: the breaker is not asked

    def why(self, failed: Mapping[str, Stress]) -> str:
        """`asked`, or who was passed over and what for: "large=slow; medium=saturated". `failed`: found out since."""
        return "; ".join(f"{name}={failed.get(name) or ill or 'saturated'}" for name, ill in self.above) or REQUESTED

    def nearest(self, failed: Mapping[str, Stress]) -> str:
        """What was wrong with the tier right above it; `asked` for the one asked for."""
        if not self.above:
            return REQUESTED
        name, ill = self.above[-1]
        return failed.get(name) or ill or "saturated"


class FallbackPlan(msgspec.Struct, frozen=True):
    fallback_steps: tuple[FallbackStep, ...]
    tier_healths: tuple[tuple[str, TierHealth], ...]  # of each tier that was looked at, after this request


def plan(
    asked: FallbackRequest,
    views: Sequence[TierSnapshot],
    tier_healths: Mapping[str, TierHealth],
    pace: ShareRamp,
    now: float,
) -> FallbackPlan:
    """`views`: the tier asked for, then those below it, best first."""
    looks = [_look(view, tier_healths.get(view.name, FULL_SHARE), pace, now) for view in views]
    if asked.stays or len(looks) == 1:
        cut = asked.resumable and not asked.stays and _is_pressed(looks[0])
        fallback_steps = (FallbackStep(asked.tier, cut=cut, last=True, forced=True),)
        return FallbackPlan(fallback_steps, tuple((look.view.name, look.tier_health) for look in looks))
    first: list[_TierAssessment] = []
    held: list[_TierAssessment] = []
    after: list[tuple[str, TierHealth]] = []
    for look in looks:
        if look.stress == "broken" or look.view.queue_s >= min(asked.left_s, look.view.first_token_timeout_s):
            after.append((look.view.name, look.tier_health))
            continue
        takes, tier_health = offered(look.tier_health, asked.place)
        (first if takes else held).append(look)
        after.append((look.view.name, tier_health))
    alive = [*first, *held]  # (1), (2)
    cut = asked.resumable and bool(alive) and all(_is_pressed(look) for look in alive)  # (4)
    order = alive or looks  # (3)
    return FallbackPlan(_rungs(order, looks, cut=cut, forced=not alive), tuple(after))


class _TierAssessment(msgspec.Struct, frozen=True):
    view: TierSnapshot
    stress: Stress
    tier_health: TierHealth


def _look(view: TierSnapshot, tier_health: TierHealth, pace: ShareRamp, now: float) -> _TierAssessment:
    stress = stress_of(view, tier_health)
    return _TierAssessment(view, stress, next_tier_health(tier_health, stress, view, pace, now))


def _is_pressed(look: _TierAssessment) -> bool:
    """It has too much to do, or had until a moment ago."""
    return (look.stress or look.tier_health.why) in ("saturated", "slow")


def _rungs(
    order: Sequence[_TierAssessment], looks: Sequence[_TierAssessment], *, cut: bool, forced: bool
) -> tuple[FallbackStep, ...]:
    seen = [(look.view.name, look.stress or look.tier_health.why) for look in looks]
    return tuple(
        FallbackStep(look.view.name, tuple(seen[: looks.index(look)]), cut, at == len(order) - 1, forced)
        for at, look in enumerate(order)
    )
