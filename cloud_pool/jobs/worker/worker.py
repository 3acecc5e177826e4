"""A worker: claims jobs for the free slots of each tier, runs them, and reports under each job's fence.

1. A slot is free: claim a job for it, with priorities by weight. Without jobs, wait until one is queued.
2. A tier is unavailable: claim nothing for it until it answers a real request.
3. Every `lease_check_s`: stop runs whose job was cancelled, expired or taken over; update which jobs are followed.
4. After a third of a lease: renew all leases.
5. Every `reclaim_interval_s`: queue jobs that are due, return jobs of lost workers to their queues, expire late jobs.
6. On `stop`: claim no more jobs; runs may end within `drain_s`; the others return to their queue with all attempts.
"""

from __future__ import annotations

import contextlib
import logging
import random
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

import anyio
from anyio.abc import TaskGroup

from causeway_server.router.errors import CausewayError, JobStoreUnavailable, RecordUnreadable
from causeway_server.router.jobs.job import JobState
from causeway_server.router.serving.stored.ports import SettleResponse

from ...lifetime import StopSignal, keep_running
from ...storage.config import JobsConfig
from ...storage.encryption import ContentKeyMissing
from ...storage.job_store import JobStore
from ...storage.record import ExpiredJob, JobRecord, LiveText
from ...storage.redis_client import JobStoreRefused
from ..metrics import JobMetrics
from .execution import JobLease, JobResult, RunReports, WorkerSlots, execute, is_tier_unavailable
from .runner import JobRunner, RunReceipt

if TYPE_CHECKING:
    from ...observability.tracing import JobTrace

MAX_CHARACTERS: Final = 262_144
"""Maximum length of one run's text in Redis, in characters; the rest comes with the result."""
_INTERVAL_S = 0.1
_OUTDATED = -1
log = logging.getLogger(__name__)
_STORE_DELAY_S = 0.2
_UNAVAILABLE_POLL_S = 0.5
_RELEASE_S = 5.0
_MAX_CLAIM = 32  # jobs per claim
_GAUGES_S = 5.0


class RunText:
    """The text of one run. `wake` is called when there is text to send."""

    def __init__(self, record: JobRecord, wake: Callable[[], None]) -> None:
        self.job = record.id
        self._owner = record.owner
        self._fence = record.fence
        self._followed = bool(record.followed)
        self._wake = wake
        self._text = ""
        self._parts: list[str] = []  # behind `_text`
        self._length = 0
        self._stored = 0  # characters in Redis

    def append(self, part: str) -> None:
        """Append the next part, unless the text is too long."""
        if self._length + len(part) > MAX_CHARACTERS:
            self._length = MAX_CHARACTERS  # a text with a gap would be worse than none
            return
        self._length += len(part)
        self._parts.append(part)
        if self._followed:
            self._wake()

    def set_followed(self, followed: bool) -> None:
        """Record whether a client follows the job now."""
        if followed and not self._followed:
            self._wake()
        self._followed = followed

    def unsent(self) -> LiveText | None:
        """Return the text that Redis does not have yet; None if there is none to send."""
        if not self._followed:
            return None
        self._text += "".join(self._parts)
        self._parts.clear()
        rest = self._text[self._stored :]
        return LiveText(self._owner, self.job, self._fence, self._stored, rest) if rest else None

    def set_stored(self, characters: int) -> None:
        """Record the number of characters that Redis has."""
        if characters == _OUTDATED:
            self._followed = False
        elif characters < len(self._text):
            self._wake()
        self._stored = max(characters, 0)


class TextPublisher:
    """Publishes the texts of a worker's runs while they are made, for clients that follow their jobs' events.

    1. Each run keeps its text so far.
    2. While a client follows the job, new text goes to Redis. One call has the texts of all runs of the worker, at most
    ten times a second. The end of a run does not wait for this: its result has the whole text.
    3. Redis replies how much it has. If it has less than was sent, the rest is sent again.
    """

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._texts: set[RunText] = set()
        self._changed = anyio.Event()

    def open(self, record: JobRecord) -> RunText:
        """Return the text of a run that begins."""
        text = RunText(record, self._wake)
        self._texts.add(text)
        return text

    def _wake(self) -> None:
        self._changed.set()

    def close(self, text: RunText) -> None:
        """End the text of a run."""
        self._texts.discard(text)

    def set_followed(self, jobs: Collection[str]) -> None:
        """Record which jobs are followed now."""
        for text in self._texts:
            text.set_followed(text.job in jobs)

    async def run(self) -> None:
        """Send new text until cancelled."""
        while True:
            await self._changed.wait()
            self._changed = anyio.Event()
            await self._send()
            await anyio.sleep(_INTERVAL_S)

    async def _send(self) -> None:
        sending = [(text, part) for text in self._texts if (part := text.unsent()) is not None]
        if not sending:
            return
        try:
            replies = await self._store.texts.append([part for _, part in sending])
        except JobStoreUnavailable:
            self._changed.set()  # again after the interval
            return
        for (text, _), stored in zip(sending, replies, strict=True):
            text.set_stored(stored)


@dataclass(eq=False, repr=False)
class Worker:
    """A worker that runs jobs."""

    store: JobStore
    runner: JobRunner
    slots: Mapping[str, WorkerSlots]  # slots by tier
    config: JobsConfig
    metrics: JobMetrics
    _: KW_ONLY
    trace: JobTrace | None = None
    settle: SettleResponse | None = None  # stores the ends of responses' jobs
    rng: Callable[[], float] = random.random  # random numbers, uniform in [0, 1)
    _leases: dict[str, JobLease] = field(default_factory=dict)
    _idle: anyio.Event = field(default_factory=anyio.Event)

    def __post_init__(self) -> None:
        self.name = f"worker-{secrets.token_hex(6)}"  # as in the records of its jobs
        self._reports = RunReports(self.store, self.config, rng=self.rng)
        self._texts = TextPublisher(self.store)

    async def run(self, stop: StopSignal) -> None:
        """Run jobs until `stop`, then until all have ended or returned to their queue."""
        with contextlib.suppress(JobStoreUnavailable):
            await self.store.unblock_all()
        async with anyio.create_task_group() as runs, anyio.create_task_group() as upkeep:
            upkeep.start_soon(keep_running, "the renewal of leases", self._renew_leases)
            upkeep.start_soon(keep_running, "the upkeep of queues", self._promote_and_expire)
            upkeep.start_soon(keep_running, "the measuring of queues", self._measure_queues)
            upkeep.start_soon(keep_running, "the sender of texts", self._texts.run)
            async with anyio.create_task_group() as claims:
                for slots in self.slots.values():
                    claims.start_soon(keep_running, "the claiming of jobs", partial(self._claim, slots, runs))
                await stop.wait()
                claims.cancel_scope.cancel()
            await self._drain()
            upkeep.cancel_scope.cancel()

    # --- (1), (2) --------------------------------------------------------------------------------------------------

    async def _claim(self, slots: WorkerSlots, runs: TaskGroup) -> None:
        leases_current, store_unavailable = True, False
        while True:
            await slots.wait_for_slot()
            if slots.tier_unavailable:
                await self._wait_until_available(slots)
            try:
                if not leases_current:
                    # Renew before claiming: this worker's own jobs may look abandoned after an outage of Redis.
                    await self._check_leases(renew=True)
                    leases_current = True
                more = await self._claim_once(slots, runs)
                if store_unavailable:
                    store_unavailable = False
                    log.info("The worker claims jobs of tier %s again.", slots.tier)
                if not more:
                    await self.store.wait(slots.tier)
            except JobStoreUnavailable as error:
                if not store_unavailable:
                    store_unavailable = True
                    log.warning("The worker claims no jobs of tier %s: %s", slots.tier, error.message)
                leases_current = False
                await anyio.sleep(_STORE_DELAY_S * (1.0 + self.rng()))

    async def _claim_once(self, slots: WorkerSlots, runs: TaskGroup) -> bool:
        """Claim and start jobs. Returns whether more may be queued."""
        if slots.free <= 0:
            return True  # Its part of the permits has shrunk meanwhile.
        claimed_at = time.time()
        # Shielded: jobs of a claim that is cut off would stay unclaimed until their lease ends.
        with anyio.CancelScope(shield=True):
            priorities = slots.preferred(min(slots.free, _MAX_CLAIM))
            claimed = await self.store.claim(self.name, slots.tier, priorities)
            for record in claimed.records:
                self._begin(slots, record, runs)
                if self.trace is not None:
                    self.trace.received(record.id, record.tier, record.traceparent, claimed_at)
            for _ in claimed.unreadable:
                self.metrics.runs.labels(slots.tier, "quarantined").inc()
            self._record_expired(claimed.expired)
        slots.set_wants_more(claimed.more)
        return claimed.more

    def _begin(self, slots: WorkerSlots, record: JobRecord, runs: TaskGroup) -> None:
        older = self._leases.get(record.id)
        if older is not None:
            older.scope.cancel()  # this worker's own lease had run out: only the new fence is valid
        lease = self._leases[record.id] = JobLease(record, time.monotonic())
        slots.acquire()
        runs.start_soon(self._run_leased, slots, lease)

    async def _wait_until_available(self, slots: WorkerSlots) -> None:
        while slots.tier_unavailable:
            slots.tier_unavailable = not await self.runner.ready(slots.tier)
            if slots.tier_unavailable:
                await anyio.sleep(_UNAVAILABLE_POLL_S * (1.0 + self.rng()))

    # --- one job ---------------------------------------------------------------------------------------------------

    async def _run_leased(self, slots: WorkerSlots, lease: JobLease) -> None:
        try:
            with lease.scope:
                await self._run(slots, lease)
            if not lease.scope.cancelled_caught:
                return
            if lease.release_on_exit:
                await self._release(lease.record)
            else:
                self.metrics.runs.labels(slots.tier, "superseded").inc()
        finally:
            if self._leases.get(lease.record.id) is lease:
                del self._leases[lease.record.id]
            slots.release()
            if not self._leases:
                self._idle.set()

    async def _run(self, slots: WorkerSlots, lease: JobLease) -> None:
        receipt, outcome = RunReceipt(), "superseded"
        text = self._texts.open(lease.record)
        try:
            outcome = await self._execute(slots, lease, receipt, text.append)
        finally:
            self._texts.close(text)
            if outcome == "superseded" and await self._was_cancelled(lease.record):
                receipt.cancel()
            receipt.close(accepted=outcome != "superseded")
        self.metrics.runs.labels(lease.record.tier, outcome).inc()
        log.info("Job %s ended with %s, attempt %d.", lease.record.id, outcome, lease.record.attempts)

    async def _was_cancelled(self, record: JobRecord) -> bool:
        """Return whether the owner has cancelled the job during this run."""
        with anyio.move_on_after(_RELEASE_S, shield=True), contextlib.suppress(CausewayError):
            current = await self.store.get(record.id, record.owner)
            return current.state is JobState.CANCELLED and current.fence == record.fence
        return False

    async def _execute(
        self, slots: WorkerSlots, lease: JobLease, receipt: RunReceipt, on_text: Callable[[str], None]
    ) -> str:
        """Run the job, report, and return the outcome."""
        record = lease.record

        async def report_progress(progress: bytes) -> None:
            with contextlib.suppress(JobStoreUnavailable):  # progress may get lost; the report of the result may not
                await self.store.publish_progress(record.id, record.fence, progress)

        result: JobResult | CausewayError
        try:
            record = lease.record = self.store.read_request(record)
            result = await execute(
                record,
                self.runner,
                self.config,
                left_s=lease.deadline - time.monotonic(),
                receipt=receipt,
                report_progress=report_progress,
                on_text=on_text,
            )
        except (ContentKeyMissing, RecordUnreadable) as error:
            log.error("Job %s cannot run: %s", record.id, error.message)
            result = error
        except CausewayError as error:
            result = error
        if isinstance(result, CausewayError) and is_tier_unavailable(result):
            slots.tier_unavailable = True
        outcome = await self._reports.report(lease, result, receipt.bill)
        if self.settle is not None and record.body and record.endpoint == "/v1/responses":
            with anyio.CancelScope(shield=True):  # the lease of a job that has ended counts as lost
                await self.settle(record.owner, record.body)
        return outcome

    # --- (3), (4), (5), (6) ----------------------------------------------------------------------------------------

    async def _renew_leases(self) -> None:
        renewed_at = time.monotonic()
        while True:
            await anyio.sleep(self.config.lease_check_s)
            renew = time.monotonic() - renewed_at >= self.config.lease_s / 3.0
            with contextlib.suppress(JobStoreUnavailable):
                await self._check_leases(renew=renew)
                renewed_at = time.monotonic() if renew else renewed_at

    async def _check_leases(self, *, renew: bool) -> None:
        """Stop the runs whose lease is lost. Raises JobStoreUnavailable."""
        fences = {lease.record.id: lease.record.fence for lease in self._leases.values()}
        states = await self.store.renew_leases(fences.items(), renew=renew)
        for job in states.lost:
            lease = self._leases.get(job)
            if lease is not None and lease.record.fence == fences[job]:
                lease.scope.cancel()
        self._texts.set_followed(states.followed)

    async def _promote_and_expire(self) -> None:
        while True:
            changed = 0
            try:
                due = await self.store.promote_and_expire()
                self._record_expired(due.expired)
                changed = due.changed
            except JobStoreRefused as error:  # one damaged record; it is out of the way by the next time
                log.error("Some delayed or expired jobs could not be moved: %s", error.message)
            except JobStoreUnavailable:  # claims say so
                pass
            if not changed:
                await anyio.sleep(self.config.reclaim_interval_s)

    def _record_expired(self, expired: tuple[ExpiredJob, ...]) -> None:
        for job in expired:
            self.runner.record_expired(job)
            self.metrics.runs.labels(job.tier, "expired").inc()

    async def _measure_queues(self) -> None:
        while True:
            with contextlib.suppress(JobStoreUnavailable):
                depths = await self.store.depths()
                self.metrics.set_depths(depths, depths.now_ms)
            await anyio.sleep(_GAUGES_S)

    async def _drain(self) -> None:
        with anyio.move_on_after(self.config.drain_s):
            while self._leases:
                self._idle = anyio.Event()
                await self._idle.wait()
        for lease in self._leases.values():
            lease.release_on_exit = True
            lease.scope.cancel()

    async def _release(self, record: JobRecord) -> None:
        try:
            with anyio.CancelScope(shield=True), anyio.move_on_after(_RELEASE_S):
                await self.store.release(record.id, record.fence)
            self.metrics.runs.labels(record.tier, "released").inc()
        except JobStoreUnavailable as error:
            log.warning(
                "Job %s could not be returned to its queue, so it waits until its lease expires: %s",
                record.id,
                error.message,
            )
