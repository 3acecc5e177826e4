"""The jobs of responses in the background: a job's Idempotency-Key is its response's id."""

from __future__ import annotations

from contextlib import suppress

import anyio

from causeway_server.router.errors import NotFound
from causeway_server.router.jobs.job import JobState
from causeway_server.router.jobs.submission import key_digest
from causeway_server.router.serving.stored.ports import BackgroundRun, RunText

from ...core.principal import Principal
from ...http.request_admission import RequestHeaders
from ...storage.redis_client import JobStoreRefused
from ...storage.stores import JobStores
from ..submission import JobSubmission
from .job_api import JobApi

_POLL_S = 0.5


class GatewayResponseJobs:
    """The jobs of responses (`BackgroundJobs`). `api`: accepts them; None in a worker, which accepts none."""

    def __init__(self, stores: JobStores, api: JobApi | None = None) -> None:
        self._stores = stores
        self._api = api

    async def look(self, owner: str, name: str) -> BackgroundRun | None:
        """Return the job as it is now; None if there is none. Raises JobStoreUnavailable."""
        try:
            job = await self._stores.jobs.of_key(owner, key_digest(name))
            record, result = await self._stores.jobs.read_answer(job, owner)
        except NotFound:
            return None
        if record.state is JobState.SUCCEEDED and not result:
            return None  # it has just expired
        return BackgroundRun(record.state, result, record.error)

    async def cancel(self, owner: str, name: str) -> None:
        """Cancel the job. Raises NotFound, JobAlreadyEnded or JobStoreUnavailable."""
        await self._stores.jobs.cancel(await self._stores.jobs.of_key(owner, key_digest(name)), owner)

    async def text(self, owner: str, name: str, known: RunText) -> RunText:
        """Return the text of the answer so far, of which `known` was read before. Raises JobStoreUnavailable."""
        try:
            job = await self._stores.jobs.of_key(owner, key_digest(name))
        except NotFound:
            return RunText()
        with suppress(JobStoreRefused):  # a full Redis: the response comes without the text on its way
            await self._stores.jobs.texts.follow(job)
        return await self._stores.jobs.texts.read_on(owner, job, known)

    async def change(self, owner: str, name: str) -> None:
        """Wait for half a second."""
        await anyio.sleep(_POLL_S)

    async def start(self, principal: Principal, headers: RequestHeaders, name: str, body: bytes) -> None:
        """Accept the job of the response `name`. Raises CausewayError."""
        assert self._api is not None
        await self._stores.durability.ensure()
        submission = JobSubmission(
            principal=principal,
            body=body,
            priority=headers.priority,
            deadline_ms=headers.deadline_ms,
            key=name,
            tags=headers.tags,
            endpoint="/v1/responses",
        )
        await self._api.submit(submission, headers.traceparent)
