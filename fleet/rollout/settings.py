"""The rules of a rollout: its cohort's settings and maintenance windows from `fleet.yaml`, and the table of its states.
`small_fleet_advice` explains before a rollout which limits a small cohort has. Transitions missing in `LIFE` are
refused. Commands import this module, so it must not need numpy.
"""

from __future__ import annotations

import math
from enum import StrEnum

import msgspec

from causeway_server.router.bundle.manifest import WHOLE

LATENCY = "latency"
MINUTES_OF_DAY = 1440


class RolloutStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stage of the ramp."""

    share: int  # share of devices that are members, of 100,000
    least_s: float = 1200.0  # minimum time of the stage
    most_s: float = 86_400.0  # maximum time of the stage, after which it is paused
    approval: bool = False  # whether the previous stage pauses after passing, until an approver accepts


class MetricLimit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A metric by which a stage is judged."""

    name: str  # `errors`, `degraded` (shares of requests), or `latency` (share slower than the control's `quantile`)
    margin: float  # the largest accepted worsening against the control, as a difference of shares
    quantile: float = 0.95  # the quantile of `latency`


METRICS = (MetricLimit("errors", 0.02), MetricLimit("degraded", 0.05), MetricLimit(LATENCY, 0.05))
"""The metrics of a cohort that does not set any."""


class RolloutSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of a cohort's rollouts."""

    stages: tuple[RolloutStage, ...]  # the stages, with growing shares
    metrics: tuple[MetricLimit, ...] = METRICS  # each once; devices that rolled back or went silent are always judged
    soak_s: float = 3600.0  # time under observation after the last stage
    first_look_s: float = 150.0  # of a stage; each later look is at twice the time of the one before
    silence_s: float = 900.0  # the silence after which a previously seen device has failed
    least_requests: int = 10  # between two looks; a device with fewer is idle and left out of the metrics
    quorum: float = 0.8  # the share of reachable members that must have committed or rolled back before a stage passes
    lost_margin: float = 0.02  # the accepted share of devices that roll back or go silent, beyond the control's
    false_rollback: float = 0.01  # the share of devices whose own trial rolls back a good bundle
    false_abort: float = 0.005  # the maximum probability that a rollout without effect is aborted
    confidence: float = 0.95  # the confidence of the intervals that decide a pass

    def window(self, stage: int) -> RolloutStage:
        """Return the stage of an index; after the last stage comes the soak, with that stage's share."""
        if stage < len(self.stages):
            return self.stages[stage]
        return RolloutStage(self.stages[-1].share, self.soak_s, 4 * self.soak_s)

    def level(self, look: int) -> float:
        """Return the error probability that each test may spend at a look of a stage, counted from 1.

        `false_abort` is divided evenly over stages, soak and tests, and over the looks as 1/(k(k + 1)), which sums to
        1. By the union bound the whole rollout keeps `false_abort`, for any dependence of the tests and any number of
        looks. (Spending functions: Lan and DeMets, Biometrika 70, 1983.)
        """
        tests = len(self.metrics) + 2  # two more tests: devices that rolled back, and silent ones
        return self.false_abort / ((len(self.stages) + 1) * tests * look * (look + 1))


def stage_devices(share: int, devices: int) -> int:
    """Return the number of devices in a share, at least one."""
    return min(devices, max(1, round(devices * share / WHOLE))) if devices else 0


def small_fleet_advice(settings: RolloutSettings, devices: int) -> list[str]:
    """Return advice for an operator about these stages with this number of devices; empty if there is none.

    1. Two stages with the same number of devices: the second only costs time.
    2. Too few devices for a comparison to abort: `m` of `n` devices can be drawn in C(n, m) ways, so the p-value of the
       randomisation test is at least 1/C(n, m). Such a stage pauses instead.
    3. Without a control before the last stage, metrics are hardly compared.
    """
    if not devices:
        return []
    counts = [stage_devices(stage.share, devices) for stage in settings.stages]
    percents = [f"{stage.share * 100 / WHOLE:g} %" for stage in settings.stages]
    advice = [  # (1)
        f"{percents[index - 1]} and {percents[index]} are both {_counted(count)}: use fewer stages"
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
    CHECK_PASSED = "check_passed"  # lint has passed, then replay
    CHECK_FAILED = "check_failed"
    STAGE_PASSED = "stage_passed"
    LAST_STAGE_PASSED = "last_stage_passed"
    SOAK_PASSED = "soak_passed"
    # an operator, an inconclusive verdict, a stage that waits for approval, or a replay without records
    PAUSE = "pause"
    RESUME = "resume"
    ACCEPT = "accept"  # an approver accepts an inconclusive stage, or a replay without records
    ABORT = "abort"  # an operator, or a verdict of fail
    REVERT = "revert"
    ALL_REVERTED = "all_reverted"


class IllegalTransition(Exception):
    """The rollout's state has no transition for this event and stays as it is."""

    def __init__(self, state: RolloutState, event: RolloutEvent) -> None:
        allowed = ", ".join(sorted(LIFE[state])) or "nothing, it has ended"
        super().__init__(f"a rollout in state {state} does not allow the event {event}; allowed are: {allowed}")


S, E = RolloutState, RolloutEvent
OPEN = (S.LINT, S.REPLAY, S.STAGE, S.SOAK, S.PAUSED, S.ABORTED)
"""The states in which a cohort takes no other rollout. A revert may run beside the next, which may be the fix."""


DECISIONS = (E.PAUSE, E.RESUME, E.ACCEPT, E.ABORT)
"""The events that an operator decides; the others are the controller's."""


LIFE: dict[RolloutState, dict[RolloutEvent, RolloutState]] = {
    S.DRAFT: {E.SUBMIT: S.LINT, E.ABORT: S.ABORTED},
    # A failing check returns the rollout to its author, since no device has seen it.
    S.LINT: {E.CHECK_PASSED: S.REPLAY, E.CHECK_FAILED: S.DRAFT, E.ABORT: S.ABORTED},
    # Without records the policy is unproven, which is not the author's fault: PAUSED until there are records, or
    # approval.
    S.REPLAY: {E.CHECK_PASSED: S.STAGE, E.CHECK_FAILED: S.DRAFT, E.PAUSE: S.PAUSED, E.ABORT: S.ABORTED},
    S.STAGE: {E.STAGE_PASSED: S.STAGE, E.LAST_STAGE_PASSED: S.SOAK, E.PAUSE: S.PAUSED, E.ABORT: S.ABORTED},
    S.SOAK: {E.SOAK_PASSED: S.DONE, E.PAUSE: S.PAUSED, E.ABORT: S.ABORTED},
    # RESUME returns to the paused state (REPLAY, STAGE or SOAK); ACCEPT goes where a pass would have gone. The verdict
    # can also ABORT, because the devices of a paused stage still run the bundle and are still judged.
    S.PAUSED: {E.RESUME: S.STAGE, E.ACCEPT: S.STAGE, E.ABORT: S.ABORTED},
    # The decision is stored before its first effect, so that a controller that dies in between reverts after a restart.
    S.ABORTED: {E.REVERT: S.REVERTING},
    S.REVERTING: {E.ALL_REVERTED: S.REVERTED},
    S.REVERTED: {},
    # Emergency rollback of a completed rollout.
    S.DONE: {E.ABORT: S.ABORTED},
}


def next_state(state: RolloutState, event: RolloutEvent) -> RolloutState:
    """Return the state after `event`. Raises IllegalTransition: the table has no such transition."""
    try:
        return LIFE[state][event]
    except KeyError:
        raise IllegalTransition(state, event) from None


class MaintenanceWindow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A time of the week in which devices may change, in each device's own local time."""

    weekdays: frozenset[int]  # ISO days on which the window opens, Monday is 1
    opens: int  # minute of the day
    closes: int  # minute of the day; on the next day if it is at or before `opens`

    def is_open(self, weekday: int, minute: int) -> bool:
        """Return whether the window is open at this minute of an ISO weekday."""
        if self.opens < self.closes:
            return weekday in self.weekdays and self.opens <= minute < self.closes
        yesterday = (weekday - 2) % 7 + 1
        return (weekday in self.weekdays and minute >= self.opens) or (
            yesterday in self.weekdays and minute < self.closes
        )


def is_silent(last_seen: float, began: float, now: float, silence_s: float) -> bool:
    """Return whether a device counts as lost: seen when the stage `began`, and not for `silence_s`. Times are Unix s.

    A device that was off before the stage is neither lost nor a member: it gets its bundle when it returns.
    """
    return last_seen >= began - silence_s and now - last_seen > silence_s
