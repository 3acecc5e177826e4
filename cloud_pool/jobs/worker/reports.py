"""The report of a run to the job store, under the fence of its lease."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Final, Literal, TypeVar

import anyio

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
    JobStoreUnavailable,
    NoRoute,
    PermissionDenied,
    QueueFull,
    RateLimited,
    RequestTimeout,
    Shed,
)
from router.types import Modality

from ...storage.backoff import job_retry_delay_s
from ...storage.config import JobsConfig
from ...storage.errors import ContentKeyMissing, TokenRevoked
from ...storage.jobs.job_store import JobStore
from ...storage.record import JobRecord, RunBill
from ...upstreams.triton.errors import StubProcessDied
from .execution import JobResult

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
    """Return the outcome of a job whose run failed.

    1. The job's deadline has passed                              expired
       The token that submitted it, or its device, is revoked     cancelled
    2. The request is invalid (4xx of ours)                       failed: another run would fail, too
    3. It never ran: the tier is unreachable, full or starting    postponed: retried without losing an attempt
    4. Any other error, a crash of the model or a bug included    retried later, as one of its attempts

    A job that kills the model's process or the whole Triton is (4): it must end as a dead letter. A Triton that is down
    for hours uses up no attempts all the same: a worker claims no jobs for a tier that does not answer (see `worker`).

    Args:
        late: the job's own deadline has passed.
    """
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


if TYPE_CHECKING:
    from ...core.late import LateReading

_T = TypeVar("_T")
_log = logging.getLogger("causeway.cloud.worker")
_STORE_DELAY_S = 0.2
_FINAL_EVENTS: Final[Mapping[FailureAction, Literal["fail", "expire", "cancel"]]] = {
    "failed": "fail",
    "expired": "expire",
    "cancelled": "cancel",
}


class JobLease:
    """A job that this worker runs. `now` is monotonic time, s.

    The deadline is counted from the claim, whose time comes from Redis: this process's wall clock may be wrong.
    """

    def __init__(self, record: JobRecord, now: float) -> None:
        self.record = record
        self.claimed_ms = record.created if record.started is None else record.started  # unix
        self.deadline = now + (record.deadline - self.claimed_ms) / 1000.0  # monotonic, s
        self.reading: LateReading | None = None  # of the parts of this run, if its answer may be revised
        self.late: tuple[Modality, ...] = ()  # kinds that will revise it, once the answer is reported
        self.scope = anyio.CancelScope()
        self.release_on_exit = False


class RunReports:
    """Reports runs.

    Args:
        clock: monotonic time, s
        rng: uniform in [0, 1)
    """

    def __init__(
        self,
        store: JobStore,
        config: JobsConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: Callable[[], float] = random.random,
    ) -> None:
        self._store = store
        self._config = config
        self._clock = clock
        self._rng = rng

    async def report(self, lease: JobLease, result: JobResult | CausewayError, bill: RunBill | None) -> str:
        """Report a run. Returns the outcome."""
        return await self.until_stored(lease.record.id, lambda: self._report_once(lease, result, bill))

    async def until_stored(self, job: str, report: Callable[[], Awaitable[_T]]) -> _T:
        """Report, waiting for an unavailable Redis: the answer is worth more than the slot. Returns what `report` does.

        Args:
            report: may be repeated. Raises JobStoreUnavailable
        """
        while True:
            try:
                # Shielded: a report that is cut off may have been accepted all the same.
                with anyio.CancelScope(shield=True):
                    return await report()
            except JobStoreUnavailable as error:
                _log.warning("%s: the report waits for Redis: %s", job, error.message)
                await anyio.sleep(_STORE_DELAY_S * (1.0 + self._rng()))

    def delay_s(self, error: CausewayError, attempts: int) -> float:
        """Return the time until a run that failed is repeated."""
        config = self._config
        if isinstance(error, RateLimited) and error.retry_after_s is not None:
            return min(error.retry_after_s, config.limit_retry_s)
        return job_retry_delay_s(attempts, self._rng(), base_s=config.backoff_s, max_s=config.backoff_max_s)

    async def _report_once(self, lease: JobLease, result: JobResult | CausewayError, bill: RunBill | None) -> str:
        """Can be repeated. Raises JobStoreUnavailable."""
        record = lease.record
        job, fence = record.id, record.fence
        if isinstance(result, JobResult):
            sealed = self._store.seal_result(record, result.body)
            accepted = await self._store.succeed(
                job, fence, sealed, result.cache, bill=bill, late=result.late, late_error=result.late_error
            )
            return "succeeded" if accepted else "superseded"
        action = classify_failure(result, late=self._clock() >= lease.deadline)
        if action in _FINAL_EVENTS:
            accepted = await self._store.fail(job, fence, result, _FINAL_EVENTS[action], bill=bill)
        else:
            counts = action == "retried"
            delay_s = self.delay_s(result, record.attempts if counts else record.postponed + 1)
            park = isinstance(result, RateLimited) and result.retry_after_s is not None
            accepted = await self._store.postpone(job, fence, result, delay_s, counts=counts, park=park, bill=bill)
        return action if accepted else "superseded"
