"""Revises the answers of jobs: waits for parts that were late, and makes the answer anew when they have been read.

A revision is a run like any other: decided anew, under the constraints and the budget of then, within the bounds of
device and cloud. Each kind of part revises an answer at most once, also over restarts: what was read is not stored, so
the part is read again, and the number of the revision makes it one effect in the cloud. A revision that cannot be made
is dropped, and the job says why.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import anyio
import anyio.abc

from models.modalities.revising import revise_each
from router.errors import DeadlineExceeded, JobStoreUnavailable
from router.jobs.job import (
    MOST_LATE,
    LateTerms,
    RevisionDropped,
    check_read,
    check_revised,
    revision_id,
)
from router.serving.logs import redacted
from router.types import Modality

from ...backends.backend import JobTerms
from ...clock import Clock
from ..record import Claimed, EdgeJob, JobAnswer, Lane
from ..store import JobOutbox
from .run import CLOUD_AWAY, DEVICE_BUSY, JobFeed, JobRuns, RunningJobs, RunningText

if TYPE_CHECKING:
    from ...serving.part_encoders import PartEncoders

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_AGAIN_S = 1.0


class JobRevisions:
    """Revises answers, each in a task of its own.

    Args:
        runs: makes answers.
        running: where jobs run.
        reader: None: this box reads no parts.
        take: takes a place to run on a lane, if there is one.
    """

    def __init__(
        self,
        store: JobOutbox,
        runs: JobRuns,
        running: RunningJobs,
        feed: JobFeed,
        clock: Clock,
        reader: PartEncoders | None,
        take: Callable[[Lane], bool],
    ) -> None:
        self._store = store
        self._runs = runs
        self._running = running
        self._feed = feed
        self._clock = clock
        self._reader = reader
        self._take = take
        self._count = 0

    def take_room(self) -> bool:
        """Whether another answer may wait for its late parts; `start` or `leave_room` follows."""
        has_room = self._reader is not None and self._count < MOST_LATE
        self._count += has_room
        return has_room

    def leave_room(self) -> None:
        self._count -= 1

    def start(self, tasks: anyio.abc.TaskGroup, claimed: Claimed) -> None:
        """Revise an answer when its late parts have been read, in the room that was taken."""
        tasks.start_soon(self._run, claimed, self._running.start(claimed.job.seq, ""))

    async def _run(self, claimed: Claimed, scope: anyio.CancelScope) -> None:
        seq = claimed.job.seq
        try:
            with scope:
                await self._revise_all(claimed)
        except Exception as error:
            log.error("an answer could not be revised: %s", redacted(error))
        finally:
            self.leave_room()
            self._running.end(seq)
            self._feed.end(seq)

    async def _revise_all(self, claimed: Claimed) -> None:
        job, late = claimed.job, claimed.job.late
        assert late is not None
        by = self._clock.monotonic() + min(late.until, job.deadline) - self._store.time.now()

        async def revise(kinds: Sequence[Modality]) -> bool:
            nonlocal job
            revised = await self._revise(Claimed(job, claimed.body), kinds)
            job = revised or job
            return revised is not None

        error = await revise_each(late.kinds, partial(self._read, claimed, by), revise)
        if error is not None:
            await self._stored(partial(self._store.drop_revision, job, error))

    async def _read(self, claimed: Claimed, by: float, kind: Modality) -> None:
        """Wait until the parts of one kind were read. Raises CausewayError."""
        if self._reader is None:
            raise RevisionDropped("this box reads no parts any more")
        check_read(await self._reader.read_late(self._runs.request(claimed, ""), by, (kind,)), kind)

    async def _revise(self, claimed: Claimed, kinds: Sequence[Modality]) -> EdgeJob | None:
        """Make the answer anew with what was read; None: no revision is wanted any more. Raises CausewayError."""
        job, late = claimed.job, claimed.job.late
        assert late is not None
        absent = tuple(kind for kind in late.kinds if kind not in kinds)
        number = job.revision + 1
        while True:
            if self._store.time.now() >= job.deadline:
                raise DeadlineExceeded("the job's deadline passed before its answer was revised")
            request = self._runs.request(claimed, late.target)
            lane = await self._runs.lane(request)
            if not self._take(lane):
                await self._feed.change(_AGAIN_S)
                continue
            self._running.move(job.seq, lane)
            terms = JobTerms(
                revision_id(job.cloud_key, number),
                job.priority,
                lambda target: self._store.pin_revision(job, target),
                LateTerms(self._clock.monotonic() + max(0.0, late.until - self._store.time.now()), absent),
            )
            answer = await self._runs.answer(claimed, request, RunningText(job.run), terms)
            self._running.move(job.seq, "")
            if isinstance(answer, JobAnswer):
                break
            error = answer.errors[-1]
            if not isinstance(error, (*CLOUD_AWAY, *DEVICE_BUSY)):
                raise error
            await self._feed.change(max(_AGAIN_S, error.retry_after_s or 0.0))
        check_revised(answer.parts, kinds)
        return await self._stored(partial(self._store.revise, job, kinds, answer))

    async def _stored(self, store: Callable[[], Awaitable[_T]]) -> _T:
        """Store it as soon as the disk takes it."""
        while True:
            try:
                return await store()
            except JobStoreUnavailable:
                await asyncio.sleep(_AGAIN_S)
