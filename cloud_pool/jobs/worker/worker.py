"""A worker: claims jobs for each tier's free places, runs them, and reports under its fence.

1. a place is free → claim for it, priorities by weight; nothing there → wait for the queue to grow
2. the tier is away → claim nothing more for it until a real request is answered
3. every `lease_check_s` ask which jobs are still ours: one that was cancelled, expired or taken over is stopped
4. a third of a lease has passed → renew it
5. stop → no more claims; what runs may end within `drain_s`; the rest is given back, and costs no attempt
"""

from __future__ import annotations

import contextlib
import logging
import random
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import anyio
from anyio.abc import TaskGroup

from router.errors import CausewayError

from ...observability.tracing import JobTrace
from ..backoff import job_retry_delay_s
from ..config import JobsConfig
from ..errors import JobStoreUnavailable
from ..metrics import JobMetrics
from ..record import JobRecord
from ..store.job_store import JobStore
from .execution import JobResult, attempt
from .failure_policy import classify_failure, is_tier_unavailable
from .runner import JobRunner
from .weighted_priorities import WeightedRoundRobin

_log = logging.getLogger("causeway.cloud.worker")
_STORE_PAUSE_S = 0.2
_UNAVAILABLE_POLL_S = 0.5
_RELEASE_S = 5.0
_MAX_CLAIM = 32  # jobs of one claim


class StopSignal(Protocol):
    """An event of anyio or asyncio."""

    async def wait(self) -> object: ...


class WorkerSlots:
    """The places of one tier in this worker. Owns who is in them."""

    def __init__(self, tier: str, places: int) -> None:
        self.tier = tier
        self.free = places
        self.shares = WeightedRoundRobin()
        self.unavailable = False
        self._changed = anyio.Event()

    def acquire(self) -> None:
        self.free -= 1

    def release(self) -> None:
        self.free += 1
        self._changed.set()
        self._changed = anyio.Event()

    async def wait_for_slot(self) -> None:
        while self.free <= 0:
            await self._changed.wait()


class JobLease:
    """A job that this worker runs."""

    def __init__(self, record: JobRecord) -> None:
        self.record = record
        self.scope = anyio.CancelScope()
        self.release_on_exit = False


class Worker:
    """`places` by tier."""

    def __init__(
        self,
        store: JobStore,
        runner: JobRunner,
        places: Mapping[str, int],
        config: JobsConfig,
        metrics: JobMetrics,
        *,
        name: str = "",
        trace: JobTrace | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: Callable[[], float] = random.random,
    ) -> None:
        self.name = name or f"worker-{secrets.token_hex(6)}"
        self._store = store
        self._runner = runner
        self._slots = [WorkerSlots(tier, count) for tier, count in places.items()]
        self._config = config
        self._metrics = metrics
        self._trace = trace
        self._clock = clock
        self._rng = rng
        self._held: dict[str, JobLease] = {}
        self._idle = anyio.Event()

    async def run(self, stop: StopSignal) -> None:
        """Until `stop`, and then until all is done or given back."""
        with contextlib.suppress(JobStoreUnavailable):
            await self._store.retire()
        async with anyio.create_task_group() as runs, anyio.create_task_group() as care:
            care.start_soon(self._renew_leases)
            care.start_soon(self._tick)
            async with anyio.create_task_group() as claims:
                for slots in self._slots:
                    claims.start_soon(self._claim, slots, runs, stop)
                await stop.wait()
                claims.cancel_scope.cancel()
            await self._drain()
            care.cancel_scope.cancel()

    # --- (1), (2) --------------------------------------------------------------------------------------------------

    async def _claim(self, slots: WorkerSlots, runs: TaskGroup, stop: StopSignal) -> None:
        fresh, unavailable = True, False
        while True:
            await slots.wait_for_slot()
            if slots.unavailable:
                await self._wait_until_available(slots)
            try:
                if not fresh:
                    await self._check_leases(renew=True)  # before we adopt what only seems to be nobody's
                    fresh = True
                # A claim that is cut off would leave its jobs to nobody until their lease ends.
                began = time.time()
                with anyio.CancelScope(shield=True):
                    claimed = await self._store.claim(
                        self.name, slots.tier, slots.shares.take(min(slots.free, _MAX_CLAIM))
                    )
                    for record in claimed.records:
                        self._begin(slots, record, runs)
                        if self._trace is not None:
                            self._trace.received(record.id, record.tier, record.traceparent, began)
                if unavailable:
                    unavailable = False
                    _log.info("jobs of %s are claimed again", slots.tier)
                if not claimed.records:
                    await self._store.wait(slots.tier, claimed.seen)
            except JobStoreUnavailable as error:
                if not unavailable:
                    unavailable = True
                    _log.warning("no jobs of %s are claimed: %s", slots.tier, error.message)
                fresh = False
                await anyio.sleep(_STORE_PAUSE_S * (1.0 + self._rng()))

    def _begin(self, slots: WorkerSlots, record: JobRecord, runs: TaskGroup) -> None:
        older = self._held.get(record.id)
        if older is not None:
            older.scope.cancel()  # our own lease had run out: the new fence is the one that counts
        held = self._held[record.id] = JobLease(record)
        slots.acquire()
        runs.start_soon(self._run_leased, slots, held)

    async def _wait_until_available(self, slots: WorkerSlots) -> None:
        while slots.unavailable:
            slots.unavailable = not await self._runner.ready(slots.tier)
            if slots.unavailable:
                await anyio.sleep(_UNAVAILABLE_POLL_S * (1.0 + self._rng()))

    # --- one job ---------------------------------------------------------------------------------------------------

    async def _run_leased(self, slots: WorkerSlots, held: JobLease) -> None:
        try:
            with held.scope:
                await self._run(slots, held.record)
            if held.release_on_exit:
                await self._release(held.record)
            elif held.scope.cancelled_caught:
                self._metrics.count_run(slots.tier, "superseded")
        finally:
            if self._held.get(held.record.id) is held:
                del self._held[held.record.id]
            slots.release()
            if not self._held:
                self._idle.set()

    async def _run(self, slots: WorkerSlots, record: JobRecord) -> None:
        left_s = min(self._config.attempt_timeout_s, (record.deadline - self._store.now_ms) / 1000.0)

        async def note(progress: bytes) -> None:
            with contextlib.suppress(JobStoreUnavailable):  # a courtesy; the report is not
                await self._store.note(record.id, record.fence, progress)

        found = await attempt(
            record,
            self._runner,
            note,
            left_s=max(left_s, 0.0),
            max_bytes=self._config.max_result_bytes,
            created=self._store.now_ms // 1000,
            clock=self._clock,
        )
        if isinstance(found, CausewayError) and is_tier_unavailable(found):
            slots.unavailable = True
        outcome = await self._report_with_retry(record, found)
        self._metrics.count_run(record.tier, outcome)
        _log.info("%s: %s, attempt %d", record.id, outcome, record.attempts)

    async def _report_with_retry(self, record: JobRecord, found: JobResult | CausewayError) -> str:
        """A Redis that is away is waited for: the answer is worth more than the place."""
        while True:
            try:
                return await self._report(record, found)
            except JobStoreUnavailable as error:
                _log.warning("%s: the report waits: %s", record.id, error.message)
                await anyio.sleep(_STORE_PAUSE_S * (1.0 + self._rng()))

    async def _report(self, record: JobRecord, found: JobResult | CausewayError) -> str:
        """What became of it. Repeatable. Raises StoreUnavailable."""
        job, fence = record.id, record.fence
        if isinstance(found, JobResult):
            return "succeeded" if await self._store.succeed(job, fence, found.body, found.cache) else "superseded"
        became = classify_failure(found, late=self._store.now_ms >= record.deadline)
        if became in ("expired", "failed"):
            done = await self._store.fail(job, fence, found, expired=became == "expired")
        else:
            tried = record.attempts if became == "retried" else record.postponed + 1
            pause_s = job_retry_delay_s(
                tried, self._rng(), base_s=self._config.backoff_s, cap_s=self._config.backoff_max_s
            )
            due = self._store.now_ms + int(pause_s * 1000)
            done = await self._store.postpone(job, fence, found, due, counts=became == "retried")
        return became if done else "superseded"

    # --- (3), (4), (5) ---------------------------------------------------------------------------------------------

    async def _renew_leases(self) -> None:
        renewed_at = self._clock()
        while True:
            await anyio.sleep(self._config.lease_check_s)
            renew = self._clock() - renewed_at >= self._config.lease_s / 3.0
            with contextlib.suppress(JobStoreUnavailable):
                await self._check_leases(renew=renew)
                renewed_at = self._clock() if renew else renewed_at

    async def _check_leases(self, *, renew: bool) -> None:
        """Stops what is no longer ours. Raises StoreUnavailable."""
        held = {one.record.id: one.record.fence for one in self._held.values()}
        for job in await self._store.keep(self.name, held.items(), renew=renew):
            one = self._held.get(job)
            if one is not None and one.record.fence == held[job]:
                one.scope.cancel()

    async def _tick(self) -> None:
        while True:
            try:
                moved = await self._store.tick()
                self._metrics.set_depths(await self._store.depths(), self._store.now_ms)
            except JobStoreUnavailable:
                moved = 0
            if not moved:
                await anyio.sleep(self._config.reclaim_interval_s)

    async def _drain(self) -> None:
        with anyio.move_on_after(self._config.drain_s):
            while self._held:
                self._idle = anyio.Event()
                await self._idle.wait()
        for held in self._held.values():
            held.release_on_exit = True
            held.scope.cancel()

    async def _release(self, record: JobRecord) -> None:
        try:
            with anyio.CancelScope(shield=True), anyio.move_on_after(_RELEASE_S):
                await self._store.release(record.id, record.fence)
            self._metrics.count_run(record.tier, "released")
        except JobStoreUnavailable as error:
            _log.warning("%s: not given back, its lease will end: %s", record.id, error.message)
