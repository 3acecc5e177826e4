"""Outcome of a job whose run failed. Pure.

1. The job's deadline has passed                              expired
   The token that submitted it, or its device, is revoked     cancelled
2. The request is invalid (4xx of ours)                       failed: another run would fail, too
3. It never ran: the tier is unreachable, full or starting    postponed: retried later without losing an attempt
4. Any other error, a crash of the model or a bug included    retried later, as one of its attempts

A job that kills the model's process or the whole Triton is (4): it must end as a dead letter. A Triton that is down for
hours uses up no attempts all the same: a worker claims no jobs for a tier that does not answer (see `worker`).
"""

from __future__ import annotations

from typing import Literal

from router.errors import (
    BackendError,
    BreakerOpen,
    CausewayError,
    CloudSaturated,
    DeadlineExceeded,
    Draining,
    EngineUnavailable,
    IdentityUnavailable,
    InvalidRequest,
    NoRoute,
    PermissionDenied,
    QueueFull,
    RateLimited,
    RequestTimeout,
    Shed,
)

from ...storage.errors import ContentKeyMissing, TokenRevoked
from ...upstreams.triton.errors import StubProcessDied

FailureAction = Literal["expired", "cancelled", "failed", "postponed", "retried"]
_NOT_STARTED = (
    QueueFull,
    Shed,
    RateLimited,
    Draining,
    CloudSaturated,
    BreakerOpen,
    EngineUnavailable,
    NoRoute,
    IdentityUnavailable,
    ContentKeyMissing,
)


def classify_failure(error: CausewayError, *, late: bool) -> FailureAction:
    """Return the outcome. `late`: the job's own deadline has passed."""
    if late:
        return "expired"  # (1)
    if isinstance(error, TokenRevoked):
        return "cancelled"
    if isinstance(error, (InvalidRequest, PermissionDenied)) and not isinstance(error, RequestTimeout):
        return "failed"  # (2)
    if was_not_started(error):
        return "postponed"  # (3)
    return "retried"  # (4)


def is_tier_unavailable(error: CausewayError) -> bool:
    """Whether other jobs of the tier would fail as well for now."""
    return isinstance(error, BackendError) and error.status == 503


def was_not_started(error: CausewayError) -> bool:
    """Whether the error proves that the request did not reach a model."""
    if isinstance(error, StubProcessDied):
        return False  # this request may have killed the model's process
    if isinstance(error, BackendError) and error.phase == "connect":
        return True
    return isinstance(error, _NOT_STARTED) and not isinstance(error, DeadlineExceeded)
