"""The plan that a rollout publishes, and the share that holds at least one box. Members are by router.bundle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from router.bundle.rollout import RolloutPlan

from .rollout import Rollout


def stage_share(share: int, positions: Iterable[int]) -> int:
    """Return `share`, or the least larger share that holds one box.

    Args:
        share: The stage's share as planned, of 100,000.
        positions: `router.bundle.rollout.position` of each device that is reachable and neither pinned nor held.
    """
    first = min(positions, default=None)
    return share if first is None else max(share, first + 1)


def plan_of(rollout: Rollout, pins: Mapping[str, str], holds: Iterable[str]) -> RolloutPlan:
    """Return the plan to sign and publish in the rollout's present state.

    A revert rolls forward: it is a newer plan with a share of 0, by which each box returns to `from_bundle`. The first
    rollout of a cohort has no bundle before it: no further box takes the bundle then, and boxes that run it keep it
    until a rollout with a better one.

    Args:
        rollout: In any state.
        pins: Device → bundle id, set by operators.
        holds: Devices that keep what they run; a held box takes no part in a revert either.
    """
    return RolloutPlan(
        cohort=rollout.cohort,
        rollout=rollout.id,
        from_bundle=rollout.from_bundle,
        to_bundle=rollout.to_bundle,
        salt=rollout.salt,
        share=rollout.share,
        pins=dict(pins),
        holds=frozenset(holds),
    )
