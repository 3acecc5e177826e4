"""The routes that generate: chats, completions, embeddings and responses, each request with exactly one outcome."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial

from aiohttp import web

from router.errors import CausewayError, ClientGone
from router.openai import ResponseEcho, parse_chat, parse_completion, parse_embedding, parse_response
from router.serving.logs import REQUEST
from router.serving.responses import EVENTS, STREAMED, HttpReplyWriter, header_lines
from router.types import Request, RoutingHints

from ..core.request_context import AnswerHead
from .request_admission import Parse, RequestAdmission
from .request_runner import RequestRunner


class GenerationRoutes:
    """The handlers.

    Args:
        admission: reads and admits requests.
        runner: answers them.
        heartbeat_s: the longest silence of a stream; 0: no limit.
        wall_clock: Unix time in seconds.
    """

    def __init__(
        self,
        admission: RequestAdmission,
        runner: RequestRunner,
        *,
        heartbeat_s: float = 0.0,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._admission = admission
        self._runner = runner
        self._heartbeat_s = heartbeat_s
        self._wall_clock = wall_clock

    async def chat(self, http: web.BaseRequest) -> web.StreamResponse:
        return await self._generate(http, partial(parse_chat, resumes=True), "chat")

    async def completion(self, http: web.BaseRequest) -> web.StreamResponse:
        return await self._generate(http, partial(parse_completion, resumes=True), "completion")

    async def embedding(self, http: web.BaseRequest) -> web.StreamResponse:
        return await self._generate(http, parse_embedding, "embedding")

    async def response(self, http: web.BaseRequest) -> web.StreamResponse:
        echoes: list[ResponseEcho] = []

        def parse(body: bytes, hints: RoutingHints) -> Request:
            request, echo = parse_response(body, hints, resumes=True)
            echoes.append(echo)
            return request

        return await self._generate(http, parse, "response", echoes)

    async def _generate(
        self, http: web.BaseRequest, parse: Parse, route: str, echoes: Sequence[ResponseEcho] = ()
    ) -> web.StreamResponse:
        """Answer a request. `echoes`: of one that is answered as a response, filled by `parse`."""
        arrived_at = self._runner.clock()
        with self._runner.ledger_entry(route, REQUEST.get(), http.headers) as entry:
            try:
                context = await self._admission.admit(http, parse, arrived_at, entry)
            except CausewayError as error:
                self._runner.refuse(entry, error)
                raise
            request = context.request
            reply = HttpReplyWriter(
                request,
                http,
                partial(_header_lines, context.id),
                id=context.id,
                created=int(self._wall_clock()),
                echo=next(iter(echoes), None),
                heartbeat_s=self._heartbeat_s,
            )
            run = self._runner.embed if request.kind == "embedding" else self._runner.run
            answer = run(entry, context, arrived_at, reply)
            try:
                # In a task of its own a token resumes fewer coroutines: those from the connection to here stay asleep.
                await (asyncio.create_task(answer) if request.stream else answer)
            except ClientGone:
                raise
            except CausewayError as error:
                return await reply.fail(error, {"x-request-id": context.id})
            return reply.response


def _header_lines(request_id: str, head: AnswerHead, media_type: str) -> str:
    """Return the header lines of an answer."""
    form = STREAMED if media_type is EVENTS else {"Content-Type": media_type}
    return header_lines({**form, "x-request-id": request_id, **dict(head.headers)})
