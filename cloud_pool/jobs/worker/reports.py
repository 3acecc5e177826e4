"""The report of a run to the job store, under the fence of its lease."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Final, Literal, TypeVar

import anyio

from router.errors import CausewayError, JobStoreUnavailable, RateLimited
from router.types import Modality

from ...storage.backoff import job_retry_delay_s
from ...storage.config import JobsConfig
from ...storage.jobs.job_store import JobStore
from ...storage.record import JobRecord, RunBill
from .execution import JobResult
from .failure_policy import FailureAction, classify_failure

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
