"""Tier states and health → the fallback steps of one request, in order, each with its reason. Pure.

1. Tiers at or below the requested one that are well enough and offer this request a share, best first.
2. Tiers whose lowered share excludes this request: better than an error, if all of (1) refuse.
3. Only broken tiers: they are tried all the same, because what looks broken may just have recovered.
4. When every working tier is under stress, answers that can be continued are truncated.
5. A critical request has exactly one step: the tier that it names, whatever its state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from .config import ShareRamp
from .tier_health import FULL_SHARE, Stress, TierHealth, TierSnapshot, next_tier_health, offer_share, stress_of

REQUESTED = "requested"
"""The reason of the requested tier itself, in headers and metrics."""


class FallbackRequest(msgspec.Struct, frozen=True):
    tier: str
    left_s: float
    position: float = 0.5  # its caller's position in the line, 0 to 1
    critical: bool = False  # this tier or none
    allowed: frozenset[str] | None = None  # tiers that may answer; None: all
    resumable: bool = False  # a truncated answer could be continued as if it had never been cut


class FallbackStep(msgspec.Struct, frozen=True):
    tier: str
    skipped: tuple[tuple[str, Stress], ...] = ()  # the tiers above it, and the stress of each
    truncated: bool = False  # its answer is truncated
    last: bool = False  # no step follows: it has all the time that is left
    forced: bool = False  # tried although it seems broken: the breaker is bypassed

    def reason(self, failed: Mapping[str, Stress]) -> str:
        """Return `requested`, or each skipped tier with its stress: "large=slow; medium=saturated".

        Args:
            failed: Stress found out by attempts since the plan was made.
        """
        reasons = (f"{name}={failed.get(name) or stress or 'saturated'}" for name, stress in self.skipped)
        return "; ".join(reasons) or REQUESTED

    def nearest_reason(self, failed: Mapping[str, Stress]) -> str:
        """Return the stress of the tier right above this one; `requested` for the requested tier."""
        if not self.skipped:
            return REQUESTED
        name, stress = self.skipped[-1]
        return failed.get(name) or stress or "saturated"


class FallbackPlan(msgspec.Struct, frozen=True):
    fallback_steps: tuple[FallbackStep, ...]
    tier_healths: tuple[tuple[str, TierHealth], ...]  # of each tier in the plan, after this request


def plan(
    request: FallbackRequest,
    views: Sequence[TierSnapshot],
    tier_healths: Mapping[str, TierHealth],
    share_ramp: ShareRamp,
    now: float,
) -> FallbackPlan:
    """Plan the steps of one request. `views`: the requested tier, then those below it, best first."""
    assessments = [_assess(view, tier_healths.get(view.name, FULL_SHARE), share_ramp, now) for view in views]
    if request.critical or len(assessments) == 1:  # (5)
        truncated = request.resumable and not request.critical and _is_under_stress(assessments[0])
        only = FallbackStep(request.tier, truncated=truncated, last=True, forced=True)
        return FallbackPlan((only,), tuple((one.view.name, one.tier_health) for one in assessments))
    offered: list[_TierAssessment] = []
    excluded: list[_TierAssessment] = []
    after: list[tuple[str, TierHealth]] = []
    for one in assessments:
        if one.stress == "broken" or one.view.queue_s >= min(request.left_s, one.view.first_token_timeout_s):
            after.append((one.view.name, one.tier_health))
            continue
        is_offered, tier_health = offer_share(one.tier_health, request.position)
        (offered if is_offered else excluded).append(one)
        after.append((one.view.name, tier_health))
    working = [*offered, *excluded]  # (1), (2)
    truncated = request.resumable and bool(working) and all(_is_under_stress(one) for one in working)  # (4)
    order = working or assessments  # (3)
    return FallbackPlan(_steps(order, assessments, truncated=truncated, forced=not working), tuple(after))


class _TierAssessment(msgspec.Struct, frozen=True):
    view: TierSnapshot
    stress: Stress
    tier_health: TierHealth


def _assess(view: TierSnapshot, tier_health: TierHealth, share_ramp: ShareRamp, now: float) -> _TierAssessment:
    stress = stress_of(view, tier_health)
    return _TierAssessment(view, stress, next_tier_health(tier_health, stress, view, share_ramp, now))


def _is_under_stress(assessment: _TierAssessment) -> bool:
    """Tell whether it has too much to do, or had until a moment ago."""
    return (assessment.stress or assessment.tier_health.stress) in ("saturated", "slow")


def _steps(
    order: Sequence[_TierAssessment], assessments: Sequence[_TierAssessment], *, truncated: bool, forced: bool
) -> tuple[FallbackStep, ...]:
    stresses = [(one.view.name, one.stress or one.tier_health.stress) for one in assessments]
    return tuple(
        FallbackStep(one.view.name, tuple(stresses[: assessments.index(one)]), truncated, at == len(order) - 1, forced)
        for at, one in enumerate(order)
    )
