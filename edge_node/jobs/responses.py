"""The jobs of responses in the background: a job's Idempotency-Key is its response's id."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from causeway_server.router.errors import NotFound
from causeway_server.router.jobs.submission import RANK, key_digest
from causeway_server.router.serving.request import PRIORITY, HttpExchange, read_choice
from causeway_server.router.serving.stored.ports import BackgroundRun, RunText
from causeway_server.router.types import Priority, RoutingHints

from .lazy_jobs import JobParts, LazyJobs
from .record import EdgeJob

if TYPE_CHECKING:
    from .run import RunningText

_POLL_S = 1.0
_PAUSE_S = 0.05  # between two looks at a text that grows


class ResponseJobs:
    """The jobs of responses (`BackgroundJobs`)."""

    def __init__(self, jobs: LazyJobs) -> None:
        self._jobs = jobs

    async def start(self, http: HttpExchange, hints: RoutingHints, most: Priority, name: str, body: bytes) -> None:
        """Accept the job of the response `name`, with at most the priority `most`. Raises CausewayError."""
        from .api import SubmittedJob

        intake = (await self._jobs.open()).intake
        priority = read_choice(http.headers, PRIORITY, RANK)
        submitted = SubmittedJob(body, hints, priority, key_digest(name), endpoint="/v1/responses", most=most)
        await intake.accept(submitted)

    async def look(self, owner: str, name: str) -> BackgroundRun | None:
        """Return the job as it is now; None if there is none. Raises JobStoreUnavailable."""
        parts = await self._jobs.open()
        try:
            job, result = await parts.store.get((await self._job(parts, owner, name)).id, owner)
        except NotFound:
            return None
        return BackgroundRun(job.state, result, job.error)

    async def cancel(self, owner: str, name: str) -> None:
        """Cancel the job. Raises NotFound, JobAlreadyEnded or JobStoreUnavailable."""
        parts = await self._jobs.open()
        job = await parts.store.cancel((await self._job(parts, owner, name)).id, owner)
        parts.runner.stop_job(job)
        parts.runner.wake()

    async def text(self, owner: str, name: str, _: RunText) -> RunText:
        """Return the text of the answer so far; none if none is being made. Raises JobStoreUnavailable."""
        running = await self._running(owner, name)
        return RunText() if running is None else RunText(running.text)

    async def change(self, owner: str, name: str) -> None:
        """Wait about a second, less if a job begins or ends, or this one's text grows."""
        running = await self._running(owner, name)
        await (running or (await self._jobs.open()).runner.feed).change(_POLL_S)
        await asyncio.sleep(_PAUSE_S)

    async def _running(self, owner: str, name: str) -> RunningText | None:
        parts = await self._jobs.open()
        try:
            return parts.runner.feed.get((await self._job(parts, owner, name)).seq)
        except NotFound:
            return None

    async def _job(self, parts: JobParts, owner: str, name: str) -> EdgeJob:
        job = await parts.store.known(owner, key_digest(name))
        if job is None:
            raise NotFound("The response's job has been deleted.")
        return job
