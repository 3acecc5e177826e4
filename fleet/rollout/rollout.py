"""A rollout as a value. Events and verdicts change its state, by the table `settings.LIFE`. The state determines the
share of devices that is published. `router.bundle` defines the members of a share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from causeway_server.router.bundle.manifest import WHOLE, RolloutPlan
from causeway_server.router.variants.verdict import VerdictOutcome

from .prediction import Prediction
from .settings import RolloutEvent, RolloutSettings, RolloutState, next_state, stage_devices
from .verdict import Observations, Verdict, judge

S, E = RolloutState, RolloutEvent
RUNNING = (S.STAGE, S.SOAK, S.PAUSED)


class Rollout(msgspec.Struct, frozen=True):
    """A rollout. Times are unix seconds, because they must survive a restart of the controller."""

    id: str
    cohort: str
    to_bundle: str
    from_bundle: str | None
    salt: str
    settings: RolloutSettings
    state: RolloutState = S.DRAFT
    stage: int = 0  # index of the stage; the number of stages in the soak
    share: int = 0  # Share of devices that are members, of 100,000. It never shrinks before the rollout is reverted.
    began: float = 0.0  # The start of the present stage or soak. Looks are timed from it, even across a pause.
    entered: float = 0.0  # The time at which the stage began or was resumed. Its `most_s` is timed from it.
    looks: int = 0  # the number of looks at this stage
    looked: float = 0.0  # the time of the last look, or of the stage's start
    paused_in: RolloutState = S.STAGE  # the state to which RESUME returns: REPLAY, STAGE or SOAK
    reason: str = ""  # the reason for which the state was entered, for people
    notes: tuple[str, ...] = ()  # the findings of its checks, for people
    predictions: tuple[Prediction, ...] = ()  # the predictions of its replay

    @property
    def has_begun(self) -> bool:
        """Whether the rollout has reached its first stage. From then on its plan is the cohort's plan."""
        return self.began > 0


def apply(
    rollout: Rollout, event: RolloutEvent, now: float, *, reason: str = "", positions: Sequence[int] = ()
) -> Rollout:
    """Return the rollout after `event`. Raises IllegalTransition.

    Args:
        now: Unix seconds.
        reason: The reason, for people and the audit log.
        positions: `router.bundle.manifest.position` of each device that is reachable and neither pinned nor held.
    """
    state = next_state(rollout.state, event)
    if event is E.ACCEPT:
        back = msgspec.structs.replace(rollout, state=rollout.paused_in)
        return apply(back, passed(back), now, reason=reason, positions=positions)
    if event is E.RESUME:
        return msgspec.structs.replace(rollout, state=rollout.paused_in, entered=now, reason=reason)
    after = msgspec.structs.replace(rollout, state=state, entered=now, reason=reason)
    if event is E.PAUSE:
        return msgspec.structs.replace(after, paused_in=rollout.state)
    if event is E.ABORT:
        # Published with the next plan: devices outside the share return to the previous bundle.
        return msgspec.structs.replace(after, share=0)
    if state not in (S.STAGE, S.SOAK):
        return after
    stages = rollout.settings.stages
    stage = len(stages) if state is S.SOAK else 0 if rollout.state is S.REPLAY else rollout.stage + 1
    share = rollout.share if state is S.SOAK else max(rollout.share, stage_share(stages[stage].share, positions))
    return msgspec.structs.replace(after, stage=stage, share=share, began=now, looks=0, looked=now)


def passed(rollout: Rollout) -> RolloutEvent:
    """Return the event that passes the replay, the present stage or the soak."""
    if rollout.state in (S.REPLAY, S.SOAK):
        return E.CHECK_PASSED if rollout.state is S.REPLAY else E.SOAK_PASSED
    return E.LAST_STAGE_PASSED if rollout.stage + 1 == len(rollout.settings.stages) else E.STAGE_PASSED


def look_due(rollout: Rollout, now: float) -> bool:
    """Return whether to judge the rollout now: at `first_look_s`, and then at twice the time of the previous look.

    A look judges devices that ran their bundle all the time since the previous look: canary and control in the same
    minutes. One paused in its replay has reached no device.
    """
    return rollout.state in RUNNING and rollout.has_begun and now >= next_look(rollout)


def next_look(rollout: Rollout) -> float:
    """Return the time of the next look, unix seconds, at least `first_look_s` after a late one."""
    first_look_s = rollout.settings.first_look_s
    return max(rollout.began + first_look_s * 2.0**rollout.looks, rollout.looked + first_look_s)


def look(
    rollout: Rollout, canary: Observations, control: Observations, now: float, positions: Sequence[int] = ()
) -> tuple[Rollout, Verdict]:
    """Judge the present stage, and apply the verdict.

    1. Fail: ABORTED, also from a pause.
    2. Pass, and the stage's minimum time is over: the next stage, the soak, or DONE. A paused rollout stays paused.
    3. The same, but the next stage needs approval: PAUSED, until ACCEPT.
    4. Otherwise, when the stage's maximum time is over: PAUSED.
    5. Otherwise it waits for the next look.

    Args:
        rollout: A rollout in STAGE, SOAK or PAUSED.
        canary, control: Observations of members and of devices outside the share since the previous look.
        now: Unix seconds.
        positions: See `apply`.
    """
    settings = rollout.settings
    verdict = judge(canary, control, settings, settings.level(rollout.looks + 1))
    rollout = msgspec.structs.replace(rollout, looks=rollout.looks + 1, looked=now)
    reason = "; ".join(verdict.reasons)
    if verdict.outcome is VerdictOutcome.FAIL:
        return apply(rollout, E.ABORT, now, reason=reason), verdict  # (1)
    if rollout.state is S.PAUSED:
        return rollout, verdict  # (2)
    if verdict.outcome is VerdictOutcome.PASS and now >= rollout.began + settings.window(rollout.stage).least_s:
        following = settings.stages[rollout.stage + 1 :]
        if following and following[0].approval:
            waiting = f"stage {rollout.stage + 2} waits for approval"
            return apply(rollout, E.PAUSE, now, reason=waiting), verdict  # (3)
        return apply(rollout, passed(rollout), now, positions=positions), verdict  # (2)
    return expire(rollout, now, reason), verdict  # (4), (5)


def expire(rollout: Rollout, now: float, reason: str = "no look was conclusive") -> Rollout:
    """Pause a stage or soak that has used up its time without passing. Call it between looks, too."""
    if rollout.state not in (S.STAGE, S.SOAK):
        return rollout
    most_s = rollout.settings.window(rollout.stage).most_s
    if now < rollout.entered + most_s:
        return rollout
    return apply(rollout, E.PAUSE, now, reason=f"inconclusive after {most_s:.0f} s: {reason}")


def stage_share(share: int, positions: Sequence[int]) -> int:
    """Return the share (of 100,000) that has exactly the stage's part of these devices, at least one: the lowest
    positions.

    A hash alone puts 2 to 9 of 20 devices into a share of 25 %. Without `positions` (see `apply`) it stays as planned.
    """
    if not positions or share >= WHOLE:
        return share
    return sorted(positions)[stage_devices(share, len(positions)) - 1] + 1


def plan_of(rollout: Rollout, pins: Mapping[str, str], holds: Iterable[str]) -> RolloutPlan:
    """Return the plan to sign and publish in the rollout's present state.

    A revert is a newer plan with a share of 0, with which each device returns to `from_bundle`. A cohort's first
    rollout has no earlier bundle: devices that run it keep it until the next rollout, no further device takes it.
    `pins`: bundle id by device; `holds`: devices that keep what they run, even during a revert.
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
