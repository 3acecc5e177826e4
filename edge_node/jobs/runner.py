"""The runner of the outbox's jobs: on the device at once, in the cloud while it is reachable, critical jobs first.

Jobs pass through the same service as requests: one Decision, the same constraints, one Outcome. The policy decides
again at each run. A job whose first target is in the cloud waits for the cloud instead of being answered by a later
target. When the cloud comes back, sending begins after a random pause and never exceeds three times
`jobs.cloud_rate_per_s`, so that a thousand devices do not overload it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

import anyio
import anyio.abc

from causeway_server.router.errors import (
    CausewayError,
    CloudSaturated,
    CloudUnreachable,
    DeadlineExceeded,
    InvalidRequest,
    JobStoreUnavailable,
)
from causeway_server.router.jobs.job import JobEvent
from causeway_server.router.serving.logs import redacted
from causeway_server.router.serving.stored.ports import SettleResponse

from ..backends.backend import CloudJobEnded, JobTerms
from ..backends.cloud.backend import Clouds
from ..clock import Clock
from ..config.schema import OutboxConfig
from ..serving.service import Service
from .record import Claimed, EdgeJob, Lane
from .run import CLOUD_AWAY, DEVICE_BUSY, JobFeed, JobRuns, RunFailure, RunningJobs
from .store import JobOutbox

log = logging.getLogger(__name__)

Report = Callable[[], Awaitable[bool]]
"""Stores the end of a run; False if the job has a later run."""
_TICK_S = 1.0
_LOOK_S = 0.01  # minimum interval of checks: many jobs may arrive at once
_PLACED_AT_ONCE = 200
_DECIDED_ANEW_S = 600.0  # interval of deciding waiting jobs again; also when the policy or the cloud's state changes
_BACKOFF_S, _MAX_BACKOFF_S = 1.0, 60.0
_RETRY_S = 2.0  # pause before a job that found no room on the device is tried again
_MAX_PAUSE_S = 60.0  # interval of checks

_CATCH_UP = 3.0  # maximum multiple of the configured rate
_PAUSE_S = 2.0  # pause if the cloud names no time
_LONGEST_PAUSE = 1.25  # in multiples of that time
_MAX_WAIT_S = 60.0


@dataclass(eq=False, repr=False)
class OutboxRunner:
    """Runs jobs until it is cancelled. `wake` makes it check at once; `settle` stores the ends of responses' jobs."""

    store: JobOutbox
    service: Service
    clouds: Clouds
    config: OutboxConfig
    clock: Clock
    new_id: Callable[[], str]
    rng: random.Random
    feed: JobFeed = field(default_factory=JobFeed, init=False)
    settle: SettleResponse | None = field(default=None, init=False)
    _wake: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _running: RunningJobs = field(default_factory=RunningJobs, init=False)
    _stopping: bool = False
    # the policy and the cloud's state at the time when lanes were decided
    _decided_under: tuple[str, bool, int] | None = None

    def __post_init__(self) -> None:
        self._gate = CloudGate(self.config, self.rng)
        self._runs = JobRuns(self.service, self.config, self.store.time, self.clock, self.new_id)

    def wake(self) -> None:
        """Check for work at once."""
        self._wake.set()

    def stop_job(self, job: EdgeJob) -> None:
        """Stop the run of a cancelled job."""
        self._running.stop(job.seq)
        self.feed.wake()  # the cloud is notified

    async def run(self) -> None:
        """Run jobs until cancelled; runs in progress then return to the queue."""
        async with anyio.create_task_group() as runs:
            try:
                await self._recover()
                while True:
                    await self._look(runs)
            finally:
                self._stopping = True

    async def _recover(self) -> None:
        """Take back the jobs that were running when the daemon ended, as soon as the disk accepts it."""
        while True:
            try:
                return await self.store.recover()
            except CausewayError as error:
                if not isinstance(error, JobStoreUnavailable):  # the store reports that itself
                    log.error("The jobs of an earlier run of the daemon could not be read: %s", redacted(error))
                await asyncio.sleep(_TICK_S)

    async def _look(self, runs: anyio.abc.TaskGroup) -> None:
        self._wake.clear()
        wait_s = _TICK_S
        try:
            wait_s = await self._step(runs)
        except JobStoreUnavailable:
            pass  # the store reports it; accepted jobs wait in it
        except Exception as error:
            log.error("Waiting jobs could not be read: %s", redacted(error))
        with anyio.move_on_after(wait_s):
            await self._wake.wait()
            await asyncio.sleep(_LOOK_S)

    async def _step(self, runs: anyio.abc.TaskGroup) -> float:
        """Start all jobs that may start. Return the seconds until the next check."""
        store, now = self.store, self.clock.monotonic()
        if self.service.draining:
            return _TICK_S
        await store.expire()
        if not store.stats.unfinished:
            return _MAX_PAUSE_S
        reachable = self._is_reachable
        if (conditions := (self.service.revision, reachable, int(now / _DECIDED_ANEW_S))) != self._decided_under:
            await store.reset_lanes()
            self._decided_under = conditions
        placed = await self._place()
        free = self.config.device_concurrency - self._running.count("edge")
        if free > 0:
            self._start_all(runs, await store.claim("edge", free), "edge")
        backlog = store.stats.unfinished > self._running.count("edge")
        sent = False
        if self._running.count("cloud") < self.config.cloud_concurrency and self._gate.may_send(
            now, reachable=reachable, backlog=backlog
        ):
            claimed = await store.claim("cloud", 1)
            self._start_all(runs, claimed, "cloud")
            sent = bool(claimed)
        if placed:
            return 0.0
        return min(_TICK_S, self._gate.wait_s(self.clock.monotonic())) if sent or reachable else _TICK_S

    async def _place(self) -> bool:
        """Decide where jobs without a lane would run now. Return whether there were any such jobs."""
        unplaced = await self.store.unplaced(_PLACED_AT_ONCE)
        lanes: list[tuple[EdgeJob, Lane]] = []
        for claimed in unplaced:
            lane: Lane = "edge"  # a refused job fails there
            try:
                lane = await self._runs.lane(self._runs.request(claimed, claimed.job.target))
            except CausewayError:
                pass
            except Exception as error:  # an error of one job, which does not affect the others
                log.error("The lane of a job could not be decided: %s", redacted(error))
            lanes.append((claimed.job, lane))
        if lanes:
            await self.store.place(lanes)
        return bool(lanes)

    @property
    def _is_reachable(self) -> bool:
        return self.clouds.is_reachable

    # --- one run -----------------------------------------------------------------------------------------------------

    def _start_all(self, runs: anyio.abc.TaskGroup, claimed: list[Claimed], lane: Lane) -> None:
        for job in claimed:
            runs.start_soon(self._run, job, self._running.start(job.job.seq, lane))

    async def _run(self, claimed: Claimed, scope: anyio.CancelScope) -> None:
        job = claimed.job
        report: Report = partial(self.store.release, job)
        try:
            with scope:
                report = await self._answer(claimed)
        except Exception as error:  # an error of one job, which does not affect the others
            log.error("A job could not be run: %s", redacted(error))
            report = self._failed(job, [CausewayError("Internal error.")], "")
        finally:
            self._running.end(job.seq)
            if not scope.cancel_called:
                with anyio.CancelScope(shield=True):
                    stored = await self._deliver(report)
                    if stored and self.settle is not None and job.endpoint == "/v1/responses":
                        await self.settle(job.owner, claimed.body)
            self.feed.end(job.seq)
            self._wake.set()

    async def _deliver(self, report: Report) -> bool:
        """Store the end of a run as soon as the disk accepts it. Return the result of `report`; False: not stored."""
        pause_s = _BACKOFF_S
        while True:
            try:
                return await report()
            except JobStoreUnavailable:
                if self._stopping:
                    return False
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2.0, _MAX_BACKOFF_S)
            except CausewayError as error:  # a bug: the job counts as running until its deadline, or a restart
                log.error("The end of a job's run could not be stored: %s", redacted(error))
                return False

    async def _answer(self, claimed: Claimed) -> Report:
        """Run a job once, and return the report of its end."""
        store, job = self.store, claimed.job
        try:
            request = self._runs.request(claimed, job.target)
        except CausewayError as error:
            failure = error
            return lambda: store.fail(job, JobEvent.FAIL, failure)
        terms = JobTerms(job.cloud_key, job.priority, lambda target: store.pin(job, target))
        answer = await self._runs.answer(claimed, request, self.feed.start(job.seq, job.run), terms)
        if isinstance(answer, RunFailure):
            return self._failed(job, answer.errors, answer.decision)
        return partial(store.succeed, job, answer)

    def _failed(self, job: EdgeJob, errors: list[CausewayError], decision: str) -> Report:
        """Return the report of a failed run: final, postponed, or not counted as an attempt. The last error counts."""
        store, now, error = self.store, self.store.time.now(), errors[-1]
        if isinstance(error, CloudJobEnded):
            return lambda: store.fail(job, error.event, error.body, decision=decision)
        if isinstance(error, CLOUD_AWAY):
            is_alone, until = len(self.clouds) < 2, now + _RETRY_S
            if is_alone or not self._is_reachable or isinstance(error, CloudSaturated):
                self._gate.pause(self.clock.monotonic(), error.retry_after_s)
            if not is_alone:  # A job whose region is cut must not be the first one again whenever a pause ends.
                until += _LONGEST_PAUSE * (error.retry_after_s or _PAUSE_S)
            unpin = isinstance(error, CloudUnreachable) and error.phase == "connect" and not job.target
            # A device that is not ready is asked again soon; one that handed off waits for the cloud.
            lane: Lane = "edge" if any(isinstance(one, DEVICE_BUSY) for one in errors) else "cloud"
            return lambda: store.release(job, until=until, unpin=unpin, lane=lane)
        if isinstance(error, DEVICE_BUSY):
            until = now + max(_RETRY_S, error.retry_after_s or 0.0)
            return lambda: store.release(job, until=until)
        if isinstance(error, DeadlineExceeded) and now >= job.deadline - _TICK_S:
            return lambda: store.fail(job, JobEvent.EXPIRE, error, decision=decision)
        if isinstance(error, InvalidRequest):
            return lambda: store.fail(job, JobEvent.FAIL, error, decision=decision)
        if job.attempts + 1 >= self.config.max_attempts:
            return lambda: store.fail(job, JobEvent.EXHAUST, error, decision=decision)
        longest_s = min(_MAX_BACKOFF_S, _BACKOFF_S * 2.0**job.attempts)
        until = now + self.rng.random() * longest_s
        return lambda: store.postpone(job, until, error, decision=decision)


class CloudGate:
    """Decides when jobs may be sent to the cloud: while it is reachable, after a random pause, at a limited rate. Else
    a thousand devices would overload the cloud when it comes back.
    """

    def __init__(self, config: OutboxConfig, rng: random.Random) -> None:
        self._jitter_s = config.jitter_s
        self._interval_s = 1.0 / (_CATCH_UP * config.cloud_rate_per_s)
        self._rng = rng
        self._was_open = False
        self._opens = 0.0
        self._next = 0.0

    def may_send(self, now: float, *, reachable: bool, backlog: bool) -> bool:
        """Return whether one job may be sent now, and count it as sent. `now`: monotonic, s. `backlog`: jobs wait."""
        if reachable and not self._was_open:
            self._opens = max(self._opens, now + (self._rng.random() * self._jitter_s if backlog else 0.0))
        self._was_open = reachable
        if not reachable or now < max(self._opens, self._next):
            return False
        self._next = max(self._next, now - self._interval_s) + self._interval_s
        return True

    def wait_s(self, now: float) -> float:
        """Return the seconds until the next job may be sent, if the cloud is reachable."""
        return max(0.0, max(self._opens, self._next) - now)

    def pause(self, now: float, seconds: float | None) -> None:
        """Pause because the cloud asked for it, or after the cloud has failed."""
        wait_s = _PAUSE_S if seconds is None else min(seconds, _MAX_WAIT_S)
        self._opens = max(self._opens, now + wait_s * (1.0 + (_LONGEST_PAUSE - 1.0) * self._rng.random()))
