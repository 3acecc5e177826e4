"""The HTTP interface of dead letters at the operators' address. As in `causeway-cloud dlq`, content is never shown.

GET    /dlq?limit=100    the newest dead letters
POST   /dlq/{id}/retry   queue one again, with all its attempts and a new deadline
DELETE /dlq/{id}         delete one with its request
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import msgspec

from causeway_server.router.errors import InvalidRequest, MethodNotAllowed, NotFound
from causeway_server.router.serving.request import AiohttpRequest, allowed_methods, served_method
from causeway_server.router.serving.responses import Handler, ServerResponse, json_response

from ...storage.job_store import JobStore
from ...storage.record import DeadLetter

_MAX_LISTED: Final = 10_000
_PATH = re.compile(r"/dlq(?:/([\w.-]{1,80})(/retry)?)?")


class _DeadLetters(msgspec.Struct):
    data: list[DeadLetter]  # `died` is in Unix milliseconds
    object: str = "list"


class _Changed(msgspec.Struct):
    id: str
    status: str  # queued or purged


class DeadLetterApi:
    """Handlers for operators; the caller has checked their scope. Each raises JobStoreUnavailable."""

    def __init__(self, jobs: JobStore) -> None:
        self._jobs = jobs

    def handler(self, request: AiohttpRequest) -> Handler | None:
        """Return the handler of a request; None for another path. Raises MethodNotAllowed."""
        match = _PATH.fullmatch(request.path)
        if match is None:
            return None
        job, retry = match.groups()
        handle: Handler = self._list
        method = "GET"
        if job and retry:
            method, handle = "POST", partial(self._change, job, self._jobs.retry, "queued")
        elif job:
            method, handle = "DELETE", partial(self._change, job, self._jobs.purge, "purged")
        if served_method(request.method, request.headers) != method:
            allowed = allowed_methods(method)
            raise MethodNotAllowed(f"{request.method[:20]} is not allowed for this path. Use {allowed}.", allow=allowed)
        return handle

    async def _list(self, request: AiohttpRequest) -> ServerResponse:
        limit = request.query.get("limit", "100")
        if not re.fullmatch(r"[0-9]{1,5}", limit) or not 1 <= int(limit) <= _MAX_LISTED:
            raise InvalidRequest(f"`limit` must be 1 to {_MAX_LISTED}.", param="limit")
        return json_response(_DeadLetters(await self._jobs.dead_letters(int(limit))))

    async def _change(
        self, job: str, act: Callable[[str], Awaitable[bool]], status: str, _: AiohttpRequest
    ) -> ServerResponse:
        if not await act(job):
            raise NotFound(f"The job {job} is not a dead letter, or its batch has already counted it.")
        return json_response(_Changed(job, status))
