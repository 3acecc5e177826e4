"""The attempts of one decision, in order: which comes next, and what the client is told when none is left."""

from __future__ import annotations

from typing import Literal

from ..errors import (
    AllAttemptsFailed,
    CausewayError,
    CloudSaturated,
    ContextLengthExceeded,
    InvalidGrammar,
    InvalidRequest,
    LowConfidence,
    NoRoute,
    QueueFull,
    UnsupportedFeature,
)
from ..types import AttemptRecord, Decision
from .attempt import Attempt, AttemptState

# Another target may have the longer context, the missing feature, or know the schema: the ask is not wrong everywhere.
_WRONG_HERE_ONLY = (ContextLengthExceeded, UnsupportedFeature, InvalidGrammar)


def next_step(error: CausewayError, *, committed: bool, remaining: int) -> Literal["next", "raise"]:
    """Whether another attempt may follow this error.

    1. the client has bytes: never;
    2. nobody is left: no;
    3. the target failed or was unsure (retryable), or the ask is too much for this target only: yes;
    4. all else (the ask is wrong, the deadline passed, the caller left): no.
    """
    if committed or remaining == 0:  # (1) (2)
        return "raise"
    if error.retryable or isinstance(error, _WRONG_HERE_ONLY):  # (3)
        return "next"
    return "raise"  # (4)


class AttemptSequence:
    """The attempts of one decision, in order. Knows which comes next and what the client is told when none is left."""

    def __init__(self, decision: Decision, *, stream: bool, choices: int = 1, arrived: float) -> None:
        self.decision = decision
        self.attempts: list[Attempt] = []
        self._plans = list(decision.attempts)
        self._stream = stream
        self._choices = choices
        self._arrived = arrived

    def begin(self) -> Attempt | None:
        """The next attempt (PENDING), or None when none is left."""
        self._skip()
        if not self._plans:
            return None
        plan = self._plans.pop(0)
        attempt = Attempt(plan, stream=self._stream, choices=self._choices, arrived=self._arrived)
        self.attempts.append(attempt)
        return attempt

    def next_step(self, error: CausewayError) -> Literal["next", "raise"]:
        self._skip()
        committed = bool(self.attempts) and self.attempts[-1].committed
        return next_step(error, committed=committed, remaining=len(self._plans))

    def failure(self, error: CausewayError) -> CausewayError:
        """What the client is told, when `error` ended the course.

        1. the ask is wrong, late or abandoned: that very error; so also after commit, where no status can change;
        2. every target found the ask too much: the last one's error, a 400;
        3. every target is saturated: 429 with the shortest Retry-After;
        4. all else: 503 with every attempt's reason.
        """
        last = self.attempts[-1] if self.attempts else None
        if last is None or last.committed or next_step(error, committed=False, remaining=1) == "raise":  # (1)
            return error
        errors = [a.error for a in self.attempts if a.error is not None and not isinstance(a.error, LowConfidence)]
        if errors and all(isinstance(e, InvalidRequest) for e in errors):  # (2)
            return errors[-1]
        reasons = "; ".join(f"{a.plan.target.name}: {_why(a)}" for a in self.attempts)
        waits = [e.retry_after_s for e in errors if e.retry_after_s is not None]
        retry_after_s = min(waits) if waits else None
        if errors and all(isinstance(e, QueueFull | CloudSaturated) for e in errors):  # (3)
            return QueueFull(f"every target is saturated: {reasons}", retry_after_s=retry_after_s or 1.0)
        return AllAttemptsFailed(f"every attempt failed: {reasons}", retry_after_s=retry_after_s)  # (4)

    @property
    def degraded(self) -> bool:
        """Whether a failure moved the answer away from the policy's first choice.

        1. that one is down and was passed over, and another answered;
        2. an earlier attempt failed: not a handoff, and not an ask too big for a target.
        """
        if not self.attempts:
            return False
        if self.decision.skipped_target not in ("", self.attempts[-1].plan.target.name):  # (1)
            return True
        return any(  # (2)
            a.state in (AttemptState.FAILED, AttemptState.TIMED_OUT) and not isinstance(a.error, InvalidRequest)
            for a in self.attempts[:-1]
        )

    def records(self, now: float) -> tuple[AttemptRecord, ...]:
        return tuple(attempt.record(now) for attempt in self.attempts)

    def _skip(self) -> None:
        # A target that comes twice is the last resort after a handoff: the second try, without a handoff, makes sense
        # only if the first was merely unsure. A target that failed is not asked again.
        while self._plans and any(
            a.plan.target.name == self._plans[0].target.name and a.state is not AttemptState.HANDED_OFF
            for a in self.attempts
        ):
            self._plans.pop(0)


def no_route(decision: Decision) -> NoRoute:
    """The error for a decision without attempts: what cut each target, in the policy's own names."""
    cuts = [
        f"{reason.target or 'no target'} ({reason.code}{': ' + reason.rule if reason.rule else ''})"
        for reason in decision.reasons
        if reason.code in ("constraint_cut", "wish_cut", "target_unable")
    ]
    detail = ", ".join(cuts) or "no route of the policy holds"
    return NoRoute(f"policy {decision.policy}@{decision.revision} leaves no target: {detail}")


def _why(attempt: Attempt) -> str:
    return attempt.state.value if attempt.error is None else f"{attempt.error.code} ({attempt.error.message})"
