"""What a rollout may do: its cohort's settings and maintenance windows, which `fleet.yaml` has, and its life, a table.

`small_fleet_advice` says before a rollout begins what its stages mean for a cohort of some size. What `LIFE` lacks is a
transition that is refused. The commands read this module, so it needs no numpy.
"""

from __future__ import annotations

import math
from enum import StrEnum

import msgspec

from causeway_server.router.bundle.manifest import WHOLE

LATENCY = "latency"
MINUTES_OF_DAY = 1440


class RolloutStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One step of the ramp.

    Attributes:
        share: Members, of 100,000.
        least_s: The stage does not pass before.
        most_s: A stage without a verdict after this time is paused.
        approval: The stage before pauses when it has passed, until an approver accepts it.
    """

    share: int
    least_s: float = 1200.0
    most_s: float = 86_400.0
    approval: bool = False


class MetricLimit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A metric that a stage is judged on.

    Attributes:
        name: `errors` or `degraded` (share of requests), or `latency` (share of requests slower than the control's
            `quantile`).
        margin: The largest worsening against the control that is accepted, as a difference of shares.
        quantile: For `latency` only.
    """

    name: str
    margin: float
    quantile: float = 0.95


METRICS = (MetricLimit("errors", 0.02), MetricLimit("degraded", 0.05), MetricLimit(LATENCY, 0.05))
"""What a cohort that names no metrics is judged on."""


class RolloutSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the rollouts of a cohort proceed.

    Attributes:
        stages: Shares that grow.
        metrics: At least one, no name twice. Devices that rolled back or went silent are judged in any case.
        soak_s: Time under observation after the last stage.
        first_look_s: The first look at a stage; each later look is at twice the time of the one before.
        silence_s: A device that was seen before and then not for so long has failed.
        least_requests: A device with fewer requests between two looks is idle and stays out of the metrics.
        quorum: Share of the reachable members that must have committed or rolled back before a stage passes.
        lost_margin: Accepted share of devices that roll back or go silent, beyond the control's.
        false_rollback: Share of devices whose own trial rolls back a bundle that is good.
        false_abort: Bound on the probability that a rollout which changes nothing is aborted.
        confidence: Of the intervals, on which a pass rests.
    """

    stages: tuple[RolloutStage, ...]
    metrics: tuple[MetricLimit, ...] = METRICS
    soak_s: float = 3600.0
    first_look_s: float = 150.0
    silence_s: float = 900.0
    least_requests: int = 10
    quorum: float = 0.8
    lost_margin: float = 0.02
    false_rollback: float = 0.01
    false_abort: float = 0.005
    confidence: float = 0.95

    def window(self, stage: int) -> RolloutStage:
        """Return the stage of that index; the one after the last is the soak, which has the last stage's share."""
        if stage < len(self.stages):
            return self.stages[stage]
        return RolloutStage(self.stages[-1].share, self.soak_s, 4 * self.soak_s)

    def level(self, look: int) -> float:
        """Return the error probability that each test may spend at a look of one stage, counted from 1.

        `false_abort` is divided evenly over stages, soak and tests, and over the looks as 1/(k(k + 1)), which sums to
        1: by the union bound the whole rollout keeps `false_abort`, however the tests depend on each other and however
        many looks there are. (Spending functions: Lan and DeMets, Biometrika 70, 1983.)
        """
        tests = len(self.metrics) + 2  # and devices that rolled back, and silent ones
        return self.false_abort / ((len(self.stages) + 1) * tests * look * (look + 1))


def stage_devices(share: int, devices: int) -> int:
    """Return about how many of so many devices a share holds; a stage has at least one."""
    return min(devices, max(1, round(devices * share / WHOLE))) if devices else 0


def small_fleet_advice(settings: RolloutSettings, devices: int) -> list[str]:
    """Return what an operator should know about these stages on so many devices; empty: nothing.

    1. Stages that hold the same number of devices only cost time.
    2. A comparison of few devices cannot abort: of `n` devices `m` can be drawn in C(n, m) ways, so the
       randomisation test never gives less than 1/C(n, m). Such a stage pauses instead.
    3. Without a control before the last stage, metrics are hardly compared at all.
    """
    if not devices:
        return []
    counts = [stage_devices(stage.share, devices) for stage in settings.stages]
    percents = [f"{stage.share * 100 / WHOLE:g} %" for stage in settings.stages]
    advice = [  # (1)
        f"{percents[index - 1]} and {percents[index]} are both about {_counted(count)}: use fewer stages"
        for index, count in enumerate(counts)
        if index and count == counts[index - 1]
    ]
    blind = [
        percent
        for percent, count in zip(percents, counts, strict=True)
        if count < devices and 1 / math.comb(devices, count) > settings.level(1)
    ]
    if blind:  # (2)
        advice.append(
            f"at {', '.join(blind)} there are too few devices for a comparison to abort the rollout: "
            "if their metrics are worse, the stage is paused and waits for an approver"
        )
    if len(counts) > 1 and counts[-2] >= devices > 0:  # (3)
        advice.append(f"{percents[-2]} leaves no device to compare with: make the last but one stage smaller")
    return advice


def _counted(count: int) -> str:
    """Return a number with its noun: `1 device`, `2 devices`."""
    return f"{count} device" if count == 1 else f"{count} devices"


class RolloutState(StrEnum):
    DRAFT = "draft"
    LINT = "lint"
    REPLAY = "replay"
    STAGE = "stage"
    SOAK = "soak"
    DONE = "done"
    PAUSED = "paused"
    ABORTED = "aborted"
    REVERTING = "reverting"
    REVERTED = "reverted"


class RolloutEvent(StrEnum):
    SUBMIT = "submit"
    CHECK_PASSED = "check_passed"  # lint, then replay
    CHECK_FAILED = "check_failed"
    STAGE_PASSED = "stage_passed"
    LAST_STAGE_PASSED = "last_stage_passed"
    SOAK_PASSED = "soak_passed"
    PAUSE = "pause"  # an operator, an inconclusive verdict, a stage that waits for approval, a replay without records
    RESUME = "resume"
    ACCEPT = "accept"  # an approver takes an inconclusive stage, or a replay without records, for passed
    ABORT = "abort"  # an operator, or a verdict of fail
    REVERT = "revert"
    ALL_REVERTED = "all_reverted"


class IllegalTransition(Exception):
    """The rollout's state, in which it stays, has no transition for this event."""

    def __init__(self, state: RolloutState, event: RolloutEvent) -> None:
        allowed = ", ".join(sorted(LIFE[state])) or "nothing, it has ended"
        super().__init__(f"a rollout in state {state} does not take the event {event}; it takes: {allowed}")


S, E = RolloutState, RolloutEvent
OPEN = (S.LINT, S.REPLAY, S.STAGE, S.SOAK, S.PAUSED, S.ABORTED)
"""States in which a cohort takes no other rollout. A revert may run beside the next rollout, which may be the fix."""


DECISIONS = (E.PAUSE, E.RESUME, E.ACCEPT, E.ABORT)
"""The events that an operator decides; the others are the controller's."""


LIFE: dict[RolloutState, dict[RolloutEvent, RolloutState]] = {
    S.DRAFT: {E.SUBMIT: S.LINT, E.ABORT: S.ABORTED},
    # A failing check returns the rollout to its author: no device has seen it.
    S.LINT: {E.CHECK_PASSED: S.REPLAY, E.CHECK_FAILED: S.DRAFT, E.ABORT: S.ABORTED},
    # Without records nothing is proven, and nothing is the author's fault: PAUSED until there are some, or an approver.
    S.REPLAY: {E.CHECK_PASSED: S.STAGE, E.CHECK_FAILED: S.DRAFT, E.PAUSE: S.PAUSED, E.ABORT: S.ABORTED},
    S.STAGE: {E.STAGE_PASSED: S.STAGE, E.LAST_STAGE_PASSED: S.SOAK, E.PAUSE: S.PAUSED, E.ABORT: S.ABORTED},
    S.SOAK: {E.SOAK_PASSED: S.DONE, E.PAUSE: S.PAUSED, E.ABORT: S.ABORTED},
    # RESUME returns to the state that was paused (REPLAY, STAGE or SOAK); ACCEPT goes where its pass would have gone.
    # ABORT also by the verdict: the devices of a paused stage still run the bundle, so they are still judged.
    S.PAUSED: {E.RESUME: S.STAGE, E.ACCEPT: S.STAGE, E.ABORT: S.ABORTED},
    # The decision is recorded before its first effect, so that a controller that dies in between reverts after restart.
    S.ABORTED: {E.REVERT: S.REVERTING},
    S.REVERTING: {E.ALL_REVERTED: S.REVERTED},
    S.REVERTED: {},
    # Emergency rollback of a rollout that is complete.
    S.DONE: {E.ABORT: S.ABORTED},
}


def next_state(state: RolloutState, event: RolloutEvent) -> RolloutState:
    """Return the state after `event`.

    Raises:
        IllegalTransition: The table has no such row.
    """
    try:
        return LIFE[state][event]
    except KeyError:
        raise IllegalTransition(state, event) from None


class MaintenanceWindow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A time of the week in which devices may change, in each device's own local time.

    Attributes:
        weekdays: ISO days on which the window opens, Monday is 1.
        opens: Minute of the day.
        closes: Minute of the day; at or before `opens` it is on the next day.
    """

    weekdays: frozenset[int]
    opens: int
    closes: int

    def is_open(self, weekday: int, minute: int) -> bool:
        """Whether it is open at this minute of an ISO weekday."""
        if self.opens < self.closes:
            return weekday in self.weekdays and self.opens <= minute < self.closes
        yesterday = (weekday - 2) % 7 + 1
        return (weekday in self.weekdays and minute >= self.opens) or (
            yesterday in self.weekdays and minute < self.closes
        )


def is_silent(last_seen: float, began: float, now: float, silence_s: float) -> bool:
    """Whether a device counts as lost: reachable when the stage began, and not seen since for longer than `silence_s`.

    A device that was off before the stage is neither lost nor a member: it gets its bundle when it comes back.

    Args:
        last_seen: When the device last reported.
        began: When the stage began.
        now: All in unix seconds by the control plane's clock.
        silence_s: Of the settings.
    """
    return last_seen >= began - silence_s and now - last_seen > silence_s
