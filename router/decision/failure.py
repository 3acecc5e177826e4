"""The error that the client gets when every attempt has failed."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import (
    AllAttemptsFailed,
    CausewayError,
    CloudRefused,
    CloudRejected,
    CloudSaturated,
    ContextLengthExceeded,
    InvalidRequest,
    LowConfidence,
    QueueFull,
    TargetNotConfigured,
    TargetsFailed,
)
from .attempts import Attempt, next_step


def final_error(attempts: Sequence[Attempt], error: CausewayError) -> CausewayError:
    """Return the client's error after `error` ended the attempts of a decision.

    1. The request is invalid, late or abandoned, or the client has bytes and no status can change: `error` itself.
    2. Every target that this box has refused the request or this box's credentials: the last refusal, with its status;
       of prompts that are too long, all.
    3. Every target is saturated: 429 with the shortest Retry-After.
    4. Every target was reached and failed: 502 with the reason of every attempt.
    5. Anything else: 503 with the reason of every attempt.
    """
    last = attempts[-1] if attempts else None
    if last is None or last.committed or next_step(error, committed=False, remaining=1) == "raise":  # (1)
        return error
    errors = [a.error for a in attempts if a.error is not None and not isinstance(a.error, LowConfidence)]
    refusals = [e for e in errors if not isinstance(e, TargetNotConfigured)]
    if refusals and all(isinstance(e, InvalidRequest | CloudRefused | CloudRejected) for e in refusals):  # (2)
        return _too_long(attempts) if all(isinstance(e, ContextLengthExceeded) for e in refusals) else refusals[-1]
    reasons = "; ".join(f"{a.plan.target.name}: {_failure_reason(a)}" for a in attempts)
    waits = [e.retry_after_s for e in errors if e.retry_after_s is not None]
    retry_after_s = min(waits) if waits else None
    if errors and all(isinstance(e, QueueFull | CloudSaturated) for e in errors):  # (3)
        return QueueFull(f"every target is saturated: {reasons}", retry_after_s=retry_after_s or 1.0)
    reached = bool(errors) and all(e.status == TargetsFailed.status for e in errors)
    kind = TargetsFailed if reached else AllAttemptsFailed
    return kind(f"every attempt failed: {reasons}", retry_after_s=retry_after_s)  # (4), (5)


def _too_long(attempts: Sequence[Attempt]) -> ContextLengthExceeded:
    """Join the refusals of all targets: each has its own context."""
    refused = [(a.plan.target.name, a.error) for a in attempts if isinstance(a.error, ContextLengthExceeded)]
    if len(refused) == 1:
        return refused[0][1]
    message = " ".join(f"{name}: {error.message}" for name, error in refused)
    return ContextLengthExceeded(message, param=refused[-1][1].param)


def _failure_reason(attempt: Attempt) -> str:
    return attempt.state.value if attempt.error is None else f"{attempt.error.code} ({attempt.error.message})"
