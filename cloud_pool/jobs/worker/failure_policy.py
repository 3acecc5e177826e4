"""What becomes of a job whose run failed. Pure.

1. the whole job's deadline passed                                   expired
2. the request itself is at fault (4xx of ours)                      failed: it would fail again
3. it never ran: the tier is unreachable, full, or starting          again later, and that is no attempt
4. anything else, a crash of the model and a fault of ours included  again later, as one of its attempts

A job that kills the model's process or the whole Triton is (4): it must end in the dead letters. A Triton that is away
for hours uses up no attempts all the same: a worker claims nothing for a tier that does not answer (`worker`).
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
    InvalidRequest,
    NoRoute,
    PermissionDenied,
    QueueFull,
    RateLimited,
    RequestTimeout,
    Shed,
)

from ...upstreams.triton.errors import StubProcessDied

FailureAction = Literal["expired", "failed", "postponed", "retried"]
_NOT_NOW = (QueueFull, Shed, RateLimited, Draining, CloudSaturated, BreakerOpen, EngineUnavailable, NoRoute)


def classify_failure(error: CausewayError, *, late: bool) -> FailureAction:
    """`late`: the job's own deadline is over."""
    if late:
        return "expired"  # (1)
    if isinstance(error, (InvalidRequest, PermissionDenied)) and not isinstance(error, RequestTimeout):
        return "failed"  # (2)
    if was_not_started(error):
        return "postponed"  # (3)
    return "retried"  # (4)


def is_tier_unavailable(error: CausewayError) -> bool:
    """Other jobs would fare no better just now."""
    return isinstance(error, BackendError) and error.status == 503


def was_not_started(error: CausewayError) -> bool:
    if isinstance(error, StubProcessDied):
        return False  # perhaps it was this request that the model's process died of
    if isinstance(error, BackendError) and error.phase == "connect":
        return True
    return isinstance(error, _NOT_NOW) and not isinstance(error, DeadlineExceeded)
