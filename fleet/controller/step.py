"""One step of one rollout, as a pure function from the rollout and the observations to the next state."""

from __future__ import annotations

import msgspec

from router.bundle.rollout import RolloutPlan

from ..rollout.rollout import RUNNING, Rollout, RolloutEvent, RolloutState, apply, expire, look, look_due
from ..rollout.settings import RolloutSettings
from ..rollout.verdict import Verdict
from .checks import Check
from .observed import Situation, least_share, observe, still_to_revert

S, E = RolloutState, RolloutEvent
CHECKED = (S.LINT, S.REPLAY)
UNPUBLISHED = (S.DRAFT, *CHECKED)


class Step(msgspec.Struct, frozen=True):
    """The rollout after a step; `verdict`: that of the look, if one was made."""

    rollout: Rollout
    verdict: Verdict | None = None


def checked(rollout: Rollout, check: Check, boxes: Situation, now: float) -> Rollout:
    """Return the rollout after LINT or REPLAY: in the next state, rejected with the first problems, or paused."""
    problems = check.problems
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        return apply(rollout, E.CHECK_FAILED, now, reason="; ".join(problems[:3]) + more)
    if check.unproven:
        return apply(rollout, E.PAUSE, now, reason=check.unproven)
    least = least_share(rollout.salt, boxes.boxes, now - rollout.settings.silence_s)
    return apply(rollout, E.CHECK_PASSED, now, least_share=least)


def has_begun(rollout: Rollout) -> bool:
    """Return whether it has reached its first stage, from which on its plan is the cohort's."""
    return rollout.began > 0


def needs_boxes(rollout: Rollout, now: float) -> bool:
    """Return whether `step` needs the boxes' reports now."""
    return look_due(rollout, now) or (rollout.state is S.REVERTING and has_begun(rollout))


def step(rollout: Rollout, situation: Situation, published: RolloutPlan | None, now: float) -> Step:
    """Return the rollout after its next step.

    1. Its published plan is ahead of the store, so the store was restored from a backup: see `caught_up`.
    2. A look is due: the verdict.
    3. The stage's or the soak's time is over: PAUSED.
    4. ABORTED and published so, or never published: REVERTING.
    5. REVERTING, and no box that can be reached runs the bundle: REVERTED.
    6. Otherwise unchanged.

    Args:
        rollout: The rollout in the store.
        situation: Needed if `needs_boxes`.
        published: The cohort's published plan.
        now: Unix seconds.
    """
    ahead = caught_up(rollout, published, now)
    if ahead is not rollout:
        return Step(ahead)  # (1)
    if look_due(rollout, now):
        canary, control = observe(rollout, situation, now)
        least = least_share(rollout.salt, situation.boxes, now - rollout.settings.silence_s)
        return Step(*look(rollout, canary, control, now, least))  # (2)
    if rollout.state in (S.STAGE, S.SOAK):
        return Step(expire(rollout, now))  # (3)
    if rollout.state is S.ABORTED and (not has_begun(rollout) or _is_published(rollout, published)):
        return Step(apply(rollout, E.REVERT, now, reason=rollout.reason))  # (4)
    if rollout.state is S.REVERTING and not still_to_revert(rollout, situation.boxes, now):
        return Step(apply(rollout, E.ALL_REVERTED, now, reason=rollout.reason))  # (5)
    return Step(rollout)  # (6)


def caught_up(rollout: Rollout, published: RolloutPlan | None, now: float) -> Rollout:
    """Return the rollout in the state that its published plan shows.

    The store is always ahead of what is published, because a decision is stored before its effect. If it is not, it was
    restored from a backup.

    1. Published with a share of 0 while the store says it runs: it had been aborted.
    2. Published with a larger share: the share is taken over, at the stage that it fits, and the rollout is paused.
    """
    if published is None or published.rollout != rollout.id or rollout.state not in (*UNPUBLISHED, *RUNNING, S.DONE):
        return rollout
    if published.share == 0:
        return apply(rollout, E.ABORT, now, reason="aborted before the store was restored from a backup")  # (1)
    if published.share <= rollout.share:
        return rollout
    shares = [stage.share for stage in rollout.settings.stages]
    stage = sum(share < published.share for share in shares)
    reason = "the store was restored from a backup, the boxes are further: resume to go on from here"
    return msgspec.structs.replace(  # (2)
        rollout,
        state=S.PAUSED,
        paused_in=S.STAGE,
        stage=min(stage, len(shares) - 1),
        share=published.share,
        began=now,
        entered=now,
        looks=0,
        looked=now,
        reason=reason,
    )


def paused_behind(rollout: Rollout, boxes: int, now: float) -> Rollout:
    """Return the rollout paused because boxes know more than the store; unchanged if it does not run."""
    if rollout.state not in (S.STAGE, S.SOAK):
        return rollout
    return apply(rollout, E.PAUSE, now, reason=f"{boxes} boxes are ahead of the control plane: was it restored?")


def adopted(plan: RolloutPlan, settings: RolloutSettings, now: float) -> Rollout:
    """Return the rollout of a published plan that the store does not know: it was restored from an older backup."""
    known = Rollout(plan.rollout, plan.cohort, plan.to_bundle, plan.from_bundle, plan.salt, settings, began=now)
    return caught_up(apply(known, E.SUBMIT, now), plan, now)


def _is_published(rollout: Rollout, published: RolloutPlan | None) -> bool:
    return published is not None and published.rollout == rollout.id and published.share == rollout.share
