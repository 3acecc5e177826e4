"""The life of a rollout as a table: a missing key is a transition that is refused."""

from __future__ import annotations

from enum import StrEnum


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
    """The rollout's state has no such transition.

    Attributes:
        state: The state that the rollout is in, and stays in.
        event: The refused event.
    """

    def __init__(self, state: RolloutState, event: RolloutEvent) -> None:
        allowed = ", ".join(sorted(LIFE[state])) or "nothing, it has ended"
        super().__init__(f"a rollout in state {state} does not take the event {event}; it takes: {allowed}")
        self.state = state
        self.event = event


S, E = RolloutState, RolloutEvent
OPEN = (S.LINT, S.REPLAY, S.STAGE, S.SOAK, S.PAUSED, S.ABORTED)
"""States in which a cohort takes no other rollout. A revert may run beside the next rollout, which may be the fix."""
DECISIONS = (E.PAUSE, E.RESUME, E.ACCEPT, E.ABORT)
"""The events that an operator decides; the others are the controller's."""
LIFE: dict[RolloutState, dict[RolloutEvent, RolloutState]] = {
    S.DRAFT: {E.SUBMIT: S.LINT, E.ABORT: S.ABORTED},
    # A failing check returns the rollout to its author: no box has seen it.
    S.LINT: {E.CHECK_PASSED: S.REPLAY, E.CHECK_FAILED: S.DRAFT, E.ABORT: S.ABORTED},
    # Without records nothing is proven, and nothing is the author's fault: PAUSED until there are some, or an approver.
    S.REPLAY: {E.CHECK_PASSED: S.STAGE, E.CHECK_FAILED: S.DRAFT, E.PAUSE: S.PAUSED, E.ABORT: S.ABORTED},
    S.STAGE: {E.STAGE_PASSED: S.STAGE, E.LAST_STAGE_PASSED: S.SOAK, E.PAUSE: S.PAUSED, E.ABORT: S.ABORTED},
    S.SOAK: {E.SOAK_PASSED: S.DONE, E.PAUSE: S.PAUSED, E.ABORT: S.ABORTED},
    # RESUME returns to the state that was paused (REPLAY, STAGE or SOAK); ACCEPT goes where its pass would have gone.
    # ABORT also by the verdict: the boxes of a paused stage still run the bundle, so they are still judged.
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
