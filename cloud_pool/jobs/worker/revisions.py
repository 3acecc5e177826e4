"""Revision of answers: parts that were late for an answer are read, and then the answer is made again with them.

1. A run ends with an answer that lacks parts: its worker keeps the job under the next fence and continues to read.
2. A part has been read: run the job again, in a slot of its tier, and replace the answer; once for each kind of part.
3. A part will not be read in time, or the run fails: the answer stays, and the job records the reason.
4. The job was cancelled or erased, or another worker has it: stop.
5. A worker is lost or drains: another one claims the job, and reads the parts again, because they are not stored.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import anyio
import msgspec
from anyio.abc import TaskGroup

from causeway_server.models.parts.revising import revise_each
from causeway_server.router.errors import CausewayError, DeadlineExceeded, JobStoreUnavailable
from causeway_server.router.jobs.job import MAX_LATE, RevisionDropped, check_revised, late_kinds, no_room, outcome_of
from causeway_server.router.serving.logs import redacted
from causeway_server.router.types import Modality

from ...core.late import DeferredParts
from ...storage.config import JobsConfig
from ...storage.encryption import ContentKeyMissing
from ...storage.job_store import JobStore
from ...storage.record import JobRecord, RevisableAnswer
from ..metrics import JobMetrics
from .execution import JobLease, JobResult, RunReports, WorkerSlots, classify_failure, execute, job_run_of
from .runner import JobRunner, RunReceipt

_RELEASE_S = 5.0
log = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class RevisionLease:
    """An answer that this worker may revise. `deadline`: deadline of the job, monotonic seconds."""

    record: JobRecord
    reading: DeferredParts
    deadline: float
    receipt: RunReceipt = field(default_factory=RunReceipt)  # receipt of the last run
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    release_on_exit: bool = False
    is_reporting: bool = False  # whether the reply to a report will tell if the lease is lost


@dataclass(eq=False, repr=False)
class Revisions:
    """The answers that one worker may revise."""

    store: JobStore
    runner: JobRunner
    slots: Mapping[str, WorkerSlots]  # slots by tier
    reports: RunReports
    config: JobsConfig
    metrics: JobMetrics
    _leases: dict[str, RevisionLease] = field(default_factory=dict)
    # jobs that wait for late parts, or will wait once their run is reported
    _rooms: set[str] = field(default_factory=set)
    _stopping: bool = False

    @property
    def fences(self) -> dict[str, int]:
        return {job: lease.record.fence for job, lease in self._leases.items()}

    def lose(self, job: str, fence: int) -> None:
        """Stop the revision of an answer whose lease is lost (4)."""
        lease = self._leases.get(job)
        if lease is not None and lease.record.fence == fence and not lease.is_reporting:
            lease.scope.cancel()

    def stop(self) -> None:
        """Leave all answers to other workers, including those that arrive later."""
        self._stopping = True
        for lease in self._leases.values():
            lease.release_on_exit = True
            lease.scope.cancel()

    # --- (1) ---------------------------------------------------------------------------------------------------------

    def open(self, record: JobRecord, deadline: float) -> DeferredParts | None:
        """Return the reader of the parts for a new run; None if its answer will not be revised.

        Args:
            record: Record with its request as it was sent.
            deadline: Deadline of the job, monotonic seconds.

        Raises CausewayError.
        """
        if not record.revise:
            return None
        by = min(time.monotonic() + record.revise / 1000.0, deadline)
        return self.runner.read_late(job_run_of(record, by), by)

    def mark(self, job: str, result: JobResult, reading: DeferredParts) -> JobResult:
        """Record in an answer the parts that may revise it, and keep room for the revision."""
        kinds = late_kinds(reading.records)
        if not kinds:
            return result
        if len(self._rooms) >= MAX_LATE:
            return msgspec.structs.replace(result, late_error=no_room())
        self._rooms.add(job)
        return msgspec.structs.replace(result, late=kinds)

    async def go_on(self, lease: JobLease, tasks: TaskGroup) -> None:
        """Continue reading the late parts of an ended run; stop it if its answer will not be revised."""
        reading, record = lease.reading, lease.record
        if reading is None:
            return
        if not lease.late:
            self._rooms.discard(record.id)
            with anyio.CancelScope(shield=True):
                await reading.close()
            return
        record = msgspec.structs.replace(record, fence=record.fence + 1, late=",".join(lease.late))
        self._start(RevisionLease(record, reading, lease.deadline), tasks)

    def _start(self, lease: RevisionLease, tasks: TaskGroup) -> None:
        self._rooms.add(lease.record.id)
        self._leases[lease.record.id] = lease
        if self._stopping:
            lease.release_on_exit = True
            lease.scope.cancel()
        tasks.start_soon(self._run, lease)

    # --- (5) ---------------------------------------------------------------------------------------------------------

    async def watch(self, tasks: TaskGroup) -> None:
        """Claim the answers of lost workers, until cancelled or stopped."""
        while not self._stopping:
            with suppress(JobStoreUnavailable):
                await self._claim(tasks)
            await anyio.sleep(self.config.reclaim_interval_s)

    async def _claim(self, tasks: TaskGroup) -> None:
        # Shielded: what a claim that is cut off has taken would wait until its lease ends.
        with anyio.CancelScope(shield=True):
            found = await self.store.late.claim(self.slots, MAX_LATE - len(self._rooms))
            self.metrics.count_revisions("too_late", found.too_late)
            self.metrics.count_revisions("failed", found.lost)
            for answer in found.answers:
                await self._resume(answer, tasks)

    async def _resume(self, answer: RevisableAnswer, tasks: TaskGroup) -> None:
        record, now = answer.record, time.monotonic()
        deadline = now + answer.left_s + (record.deadline - record.late_until) / 1000.0
        try:
            record = self.store.read_request(record)
            by = now + answer.left_s
            reading = self.runner.read_late(job_run_of(record, by), by)
            if reading is None:
                raise RevisionDropped("No tier reads such parts any more.")
        except ContentKeyMissing as error:
            log.error("%s is left to another worker: %s", record.id, error.message)
            return
        except CausewayError as error:
            if await self.store.late.drop(record.id, record.fence, error):
                self.metrics.count_revisions(outcome_of(error))
            return
        if (older := self._leases.get(record.id)) is not None:
            older.scope.cancel()  # this worker's own lease had run out
        self._start(RevisionLease(record, reading, deadline), tasks)

    # --- one answer --------------------------------------------------------------------------------------------------

    async def _run(self, lease: RevisionLease) -> None:
        record = lease.record
        try:
            with lease.scope:
                await self._revise_all(lease)
            if lease.scope.cancelled_caught:
                await self._end_early(lease)
        except Exception as error:
            log.error("%s: its answer could not be revised: %s", record.id, redacted(error))
        finally:
            lease.receipt.close(accepted=False)
            if self._leases.get(record.id) is lease:
                del self._leases[record.id]
                self._rooms.discard(record.id)
            with anyio.CancelScope(shield=True):
                await lease.reading.close()

    async def _end_early(self, lease: RevisionLease) -> None:
        if not lease.release_on_exit:
            self.metrics.count_revisions("superseded")
            return
        with anyio.CancelScope(shield=True), anyio.move_on_after(_RELEASE_S), suppress(JobStoreUnavailable):
            await self.store.release(lease.record.id, lease.record.fence)

    async def _revise_all(self, lease: RevisionLease) -> None:
        error = await revise_each(lease.record.late_kinds, lease.reading.read, partial(self._revise, lease))
        if error is None:
            return
        record, bill = lease.record, lease.receipt.bill
        dropped = await self._report(lease, partial(self.store.late.drop, record.id, record.fence, error, bill=bill))
        self.metrics.count_revisions(outcome_of(error) if dropped else "superseded")
        log.info("%s: its answer is not revised: %s", record.id, error.code)

    async def _revise(self, lease: RevisionLease, kinds: Sequence[Modality]) -> bool:
        """Revise the answer (2). Return False if no revision is wanted any more. Raises CausewayError."""
        record = lease.record
        left = tuple(kind for kind in record.late_kinds if kind not in kinds)
        lease.reading.leave_out(left)
        result = await self._answer(lease)
        check_revised(lease.reading.records, kinds)
        sealed, bill = self.store.seal_result(record, result.body), lease.receipt.bill
        revise = partial(self.store.late.revise, record.id, record.fence, sealed, result.cache, left=left, bill=bill)
        revised = await self._report(lease, revise)
        lease.receipt = RunReceipt()
        lease.record = msgspec.structs.replace(record, fence=record.fence + 1, late=",".join(left))
        self.metrics.count_revisions("made" if revised else "superseded")
        return revised

    async def _report(self, lease: RevisionLease, report: Callable[[], Awaitable[bool]]) -> bool:
        lease.is_reporting = True
        try:
            accepted = await self.reports.until_stored(lease.record.id, report)
        finally:
            lease.is_reporting = False
        lease.receipt.close(accepted=accepted)
        return accepted

    async def _answer(self, lease: RevisionLease) -> JobResult:
        """Run the job. A run that could not begin is repeated. Raises CausewayError."""
        attempt = 0
        while not isinstance(result := await self._execute(lease), JobResult):
            if classify_failure(result, late=time.monotonic() >= lease.deadline) != "postponed":
                raise result
            lease.receipt.close(accepted=False)
            attempt += 1
            await anyio.sleep(self.reports.delay_s(result, attempt))
        return result

    async def _execute(self, lease: RevisionLease) -> JobResult | CausewayError:
        slots = self.slots[lease.record.tier]
        with anyio.move_on_after(lease.deadline - time.monotonic()):
            await slots.wait_for_slot()
        left_s = lease.deadline - time.monotonic()
        if left_s <= 0.0:
            return DeadlineExceeded("The job's deadline passed before its answer was revised.")
        lease.receipt = RunReceipt()
        slots.acquire()
        try:
            return await execute(
                lease.record, self.runner, self.config, left_s=left_s, receipt=lease.receipt, late=lease.reading
            )
        finally:
            slots.release()
