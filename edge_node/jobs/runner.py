"""Runs the jobs of the outbox: on the device at once, in the cloud while that is reachable; critical ones first.

Jobs pass the same service as requests: one Decision, the same constraints, one Outcome. The policy decides anew at each
run. A job whose first target is in the cloud waits for the cloud and is not answered by a lesser target. When the cloud
comes back, sending begins after a random pause and never exceeds `_CATCH_UP` times `jobs.steady_per_s`, so that a
thousand boxes do not storm it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

import anyio
import anyio.abc
import msgspec

from router.errors import (
    BreakerOpen,
    CausewayError,
    CloudSaturated,
    CloudUnavailable,
    CloudUnreachable,
    DeadlineExceeded,
    Draining,
    EngineUnavailable,
    InvalidRequest,
    JobStoreUnavailable,
    QueueFull,
    RateLimited,
)
from router.jobs.states import JobEvent
from router.jobs.submission import parse_job_request
from router.types import Request, RoutingHints

from ..backends.backend import CloudJobEnded, JobTerms
from ..backends.cloud.backend import CloudBackend
from ..clock import Clock
from ..config.schema import JobsConfig
from ..observability.logs import redacted
from ..serving.request_context import RequestContext
from ..serving.service import Service
from .errors import ResultTooLarge
from .feed import JobFeed
from .record import EdgeJob, Lane
from .reply import JobReply
from .store import JobStore
from .tables import Claimed

log = logging.getLogger(__name__)

_CATCH_UP = 3.0  # times the steady rate, at most
_TICK_S = 1.0
_LOOK_S = 0.01  # at least between two looks: many jobs may come at once
_PLACED_AT_ONCE = 200
_DECIDED_ANEW_S = 600.0  # waiting jobs are decided anew that often, and when the policy or the cloud's state changes
_BACKOFF_S, _LONGEST_BACKOFF_S = 1.0, 60.0
_SOON_S = 2.0  # until a job is tried again that found no room on the device
_LONGEST_PAUSE_S = 60.0
# The cloud is away or full: its jobs wait, and this is no attempt.
_CLOUD_AWAY = (CloudUnreachable, CloudUnavailable, CloudSaturated, BreakerOpen)
# The device is not ready: the same.
_DEVICE_BUSY = (EngineUnavailable, QueueFull, RateLimited, Draining, JobStoreUnavailable)


class CloudGate:
    """When jobs may go to the cloud: while it is reachable, after a random pause, at a bounded rate.

    Args:
        chance: draws the pauses.
    """

    def __init__(self, config: JobsConfig, chance: random.Random) -> None:
        self._jitter_s = config.jitter_s
        self._interval_s = 1.0 / (_CATCH_UP * config.steady_per_s)
        self._chance = chance
        self._was_open = False
        self._opens = 0.0
        self._next = 0.0

    def may_send(self, now: float, *, reachable: bool, backlog: bool) -> bool:
        """Whether one job may be sent now, which it then is. `now`: monotonic, s. `backlog`: jobs wait."""
        if reachable and not self._was_open:
            self._opens = max(self._opens, now + (self._chance.random() * self._jitter_s if backlog else 0.0))
        self._was_open = reachable
        if not reachable or now < max(self._opens, self._next):
            return False
        self._next = max(self._next, now - self._interval_s) + self._interval_s
        return True

    def wait_s(self, now: float) -> float:
        """Until the next job may be sent, if the cloud is reachable."""
        return max(0.0, max(self._opens, self._next) - now)

    def pause(self, now: float, seconds: float | None) -> None:
        """The cloud asked for a pause, or failed."""
        wait_s = _SOON_S if seconds is None else min(seconds, _LONGEST_PAUSE_S)
        self._opens = max(self._opens, now + wait_s * (1.0 + 0.25 * self._chance.random()))


class JobRunner:
    """Runs jobs until it is cancelled. `wake` lets it look at once."""

    def __init__(
        self,
        store: JobStore,
        service: Service,
        cloud: CloudBackend | None,
        revision: Callable[[], str],
        config: JobsConfig,
        clock: Clock,
        new_id: Callable[[], str],
        chance: random.Random,
    ) -> None:
        self._store = store
        self._service = service
        self._cloud = cloud
        self._revision = revision
        self._config = config
        self._clock = clock
        self._new_id = new_id
        self._chance = chance
        self.feed = JobFeed()
        self._gate = CloudGate(config, chance)
        self._wake = asyncio.Event()
        self._running: dict[int, tuple[Lane, anyio.CancelScope]] = {}  # by the job's number
        self._stopping = False
        self._decided_under: tuple[str, bool, int] | None = None  # what lanes were decided under

    def wake(self) -> None:
        """Look for work at once."""
        self._wake.set()

    def stop_job(self, job: EdgeJob) -> None:
        """Stop the run of a job that was cancelled."""
        if (running := self._running.get(job.seq)) is not None:
            running[1].cancel()

    async def run(self) -> None:
        """Run jobs until cancelled; runs in progress are then given back."""
        while not await self._recovered():  # noqa: ASYNC110 -- the disk has no event
            await asyncio.sleep(_TICK_S)
        async with anyio.create_task_group() as runs:
            try:
                while True:
                    await self._look(runs)
            finally:
                self._stopping = True

    async def _recovered(self) -> bool:
        try:
            await self._store.recover()
        except JobStoreUnavailable:
            return False
        return True

    async def _look(self, runs: anyio.abc.TaskGroup) -> None:
        self._wake.clear()
        wait_s = _TICK_S
        try:
            wait_s = await self._step(runs)
        except JobStoreUnavailable:
            pass  # the store says so; accepted jobs wait in it
        except Exception as error:
            log.error("jobs could not be looked for: %s", redacted(error))
        with anyio.move_on_after(wait_s):
            await self._wake.wait()
            await asyncio.sleep(_LOOK_S)

    async def _step(self, runs: anyio.abc.TaskGroup) -> float:
        """Start what may start. Returns the seconds until the next look."""
        store, now = self._store, self._clock.monotonic()
        if self._service.draining:
            return _TICK_S
        await store.expire()
        if not store.stats.unfinished:
            return _LONGEST_PAUSE_S
        reachable = self._cloud is not None and self._cloud.health.reachable is True
        if (conditions := (self._revision(), reachable, int(now / _DECIDED_ANEW_S))) != self._decided_under:
            await store.reset_lanes()
            self._decided_under = conditions
        placed = await self._place()
        free = self._config.device_concurrency - self._count("edge")
        if free > 0:
            self._start_all(runs, await store.claim("edge", free), "edge")
        backlog = store.stats.unfinished > self._count("edge")
        sent = False
        if self._count("cloud") < self._config.cloud_concurrency and self._gate.may_send(
            now, reachable=reachable, backlog=backlog
        ):
            claimed = await store.claim("cloud", 1)
            self._start_all(runs, claimed, "cloud")
            sent = bool(claimed)
        if placed:
            return 0.0
        return min(_TICK_S, self._gate.wait_s(self._clock.monotonic())) if sent or reachable else _TICK_S

    async def _place(self) -> bool:
        """Decide where jobs without a lane would run now. Returns whether there were any."""
        unplaced = await self._store.unplaced(_PLACED_AT_ONCE)
        lanes: list[tuple[EdgeJob, Lane]] = []
        for claimed in unplaced:
            lane: Lane = "edge"  # one that cannot be decided fails there
            try:
                decision = await self._service.preview(self._request(claimed))
                if decision.attempts:
                    lane = decision.attempts[0].target.at
            except CausewayError:
                pass
            lanes.append((claimed.job, lane))
        if lanes:
            await self._store.place(lanes)
        return bool(lanes)

    def _count(self, lane: Lane) -> int:
        return sum(1 for running, _ in self._running.values() if running == lane)

    # --- one run -----------------------------------------------------------------------------------------------------

    def _start_all(self, runs: anyio.abc.TaskGroup, claimed: list[Claimed], lane: Lane) -> None:
        for one in claimed:
            scope = anyio.CancelScope()
            self._running[one.job.seq] = (lane, scope)
            runs.start_soon(self._run, one, scope)

    async def _run(self, claimed: Claimed, scope: anyio.CancelScope) -> None:
        job = claimed.job
        report: Callable[[], Awaitable[bool]] = lambda: self._store.release(job)  # noqa: E731
        try:
            with scope:
                report = await self._answer(claimed)
        finally:
            self._running.pop(job.seq, None)
            if not scope.cancel_called:
                with anyio.CancelScope(shield=True):
                    await self._deliver(report)
            self.feed.end(job.seq)
            self._wake.set()

    async def _deliver(self, report: Callable[[], Awaitable[bool]]) -> None:
        """Store the end of a run, as soon as the disk takes it: the run is not repeated for that."""
        pause_s = _BACKOFF_S
        while True:
            try:
                await report()
                return
            except JobStoreUnavailable:
                if self._stopping:
                    return
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2.0, _LONGEST_BACKOFF_S)

    async def _answer(self, claimed: Claimed) -> Callable[[], Awaitable[bool]]:
        """Run a job once. Returns how to report its end."""
        store, job = self._store, claimed.job
        decision = self._new_id()
        try:
            request = self._request(claimed)
        except CausewayError as error:
            failure = error
            return lambda: store.fail(job, JobEvent.FAIL, failure)
        text = self.feed.start(job.seq, job.run)
        reply = JobReply(request, decision, int(self._clock.unix()), text)
        terms = JobTerms(job.cloud_key, job.priority, lambda target: store.pin(job, target))
        context = RequestContext(request, reply, id=decision, arrived=self._clock.monotonic(), job=terms)
        try:
            await self._service.answer(context)
            result = reply.body()
            if len(result) > self._config.max_result_bytes:
                raise ResultTooLarge(f"the answer is larger than {self._config.max_result_bytes} bytes")
        except CausewayError as error:
            return self._failed(job, _errors(context, error), decision)
        assert reply.head is not None
        head = reply.head
        return lambda: store.succeed(job, result, cache=context.cache, route=head.route, decision=decision)

    def _failed(self, job: EdgeJob, errors: list[CausewayError], decision: str) -> Callable[[], Awaitable[bool]]:
        """The end of a run that failed: for good, until later, or no attempt at all. The last error counts."""
        store, now, error = self._store, self._store.time.now(), errors[-1]
        if isinstance(error, CloudJobEnded):
            return lambda: store.fail(job, error.event, error.body, decision=decision)
        if isinstance(error, _CLOUD_AWAY):
            self._gate.pause(self._clock.monotonic(), error.retry_after_s)
            unpin = isinstance(error, CloudUnreachable) and error.phase == "connect" and not job.target
            # A device that is not ready is asked again soon; one that handed off waits for the cloud.
            lane: Lane = "edge" if any(isinstance(one, _DEVICE_BUSY) for one in errors) else "cloud"
            return lambda: store.release(job, until=now + _SOON_S, unpin=unpin, lane=lane)
        if isinstance(error, _DEVICE_BUSY):
            until = now + max(_SOON_S, error.retry_after_s or 0.0)
            return lambda: store.release(job, until=until)
        if isinstance(error, DeadlineExceeded) and now >= job.deadline - _TICK_S:
            return lambda: store.fail(job, JobEvent.EXPIRE, error, decision=decision)
        if isinstance(error, InvalidRequest):
            return lambda: store.fail(job, JobEvent.FAIL, error, decision=decision)
        if job.attempts + 1 >= self._config.max_attempts:
            return lambda: store.fail(job, JobEvent.EXHAUST, error, decision=decision)
        longest_s = min(_LONGEST_BACKOFF_S, _BACKOFF_S * 2.0**job.attempts)
        until = now + self._chance.random() * longest_s
        return lambda: store.postpone(job, until, error, decision=decision)

    def _request(self, claimed: Claimed) -> Request:
        """The request as it runs now. Raises InvalidRequest where this version refuses what was accepted."""
        job = claimed.job
        left_ms = max(1, int((job.deadline - self._store.time.now()) * 1000.0))
        hints = RoutingHints(prefer=job.prefer, tags=job.tags, client=job.owner)
        request = parse_job_request(job.endpoint, claimed.body, hints)
        hints = msgspec.structs.replace(request.hints, deadline_ms=left_ms)
        if not job.may_leave:
            hints = msgspec.structs.replace(hints, prefer="only_on_device")
        model = job.target or request.model
        return msgspec.structs.replace(request, hints=hints, model=model, stream=True)


def _errors(context: RequestContext, error: CausewayError) -> list[CausewayError]:
    """The errors of the attempts, which say more than that all failed; `error` if the last one has none."""
    sequence = context.generation.sequence
    errors = [] if sequence is None else [attempt.error for attempt in sequence.attempts]
    return [one for one in errors if one is not None] if errors and errors[-1] is not None else [error]
