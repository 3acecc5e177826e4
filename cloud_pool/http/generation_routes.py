"""The routes that generate: chats, completions, embeddings and responses, each request with exactly one outcome."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from functools import partial

from aiohttp import web

from router.errors import CausewayError
from router.openai import (
    AnswerEncoder,
    ResponseEcho,
    ResponseEncoder,
    parse_chat,
    parse_completion,
    parse_embedding,
    parse_response,
)
from router.serving.logs import REQUEST
from router.types import Chunk, Request, RoutingHints

from ..core.request_context import AnswerHead, RequestContext
from .request_admission import Parse, RequestAdmission
from .request_runner import RequestRunner
from .responses import Encoder, OnChunk, stream_response, whole_response

_log = logging.getLogger("causeway.cloud.server")
MakeEncoder = Callable[[Request, str, str, int], Encoder]
"""Request, its id, the model and the Unix time (s) → the encoder of its answer."""


class GenerationRoutes:
    """The handlers.

    Args:
        admission: reads and admits requests.
        runner: answers them.
        wall_clock: Unix time in seconds.
    """

    def __init__(
        self, admission: RequestAdmission, runner: RequestRunner, *, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._admission = admission
        self._runner = runner
        self._wall_clock = wall_clock

    async def chat(self, http: web.BaseRequest) -> web.StreamResponse:
        return await self._generate(http, partial(parse_chat, resumes=True), partial(_encoder, "chatcmpl"), "chat")

    async def completion(self, http: web.BaseRequest) -> web.StreamResponse:
        parse = partial(parse_completion, resumes=True)
        return await self._generate(http, parse, partial(_encoder, "cmpl"), "completion")

    async def embedding(self, http: web.BaseRequest) -> web.StreamResponse:
        return await self._generate(http, parse_embedding, partial(_encoder, "emb"), "embedding")

    async def response(self, http: web.BaseRequest) -> web.StreamResponse:
        echoes: list[ResponseEcho] = []

        def parse(body: bytes, hints: RoutingHints) -> Request:
            request, echo = parse_response(body, hints, resumes=True)
            echoes.append(echo)
            return request

        def encode(request: Request, request_id: str, model: str, created: int) -> ResponseEncoder:
            return ResponseEncoder(request, echoes[0], f"resp_{request_id}", model, created)

        return await self._generate(http, parse, encode, "response")

    async def _generate(
        self, http: web.BaseRequest, parse: Parse, encode: MakeEncoder, route: str
    ) -> web.StreamResponse:
        arrived_at = self._runner.clock()
        with self._runner.ledger_entry(route, REQUEST.get(), http.headers) as entry:
            try:
                context = await self._admission.admit(http, parse, arrived_at, entry)
            except CausewayError as error:
                self._runner.refuse(entry, error)
                raise
            if context.request.kind == "embedding":
                return await self._runner.embed(entry, context, arrived_at)
            delivery = _HttpDelivery(http, context, encode, int(self._wall_clock()))
            answer = self._runner.run(entry, context, arrived_at, delivery)
            # In a task of its own a token resumes fewer coroutines: those from the connection down to here stay asleep.
            return await (asyncio.create_task(answer) if context.request.stream else answer)


class _HttpDelivery:
    """Delivers an answer as a whole response or as server-sent events. `created`: Unix time in seconds."""

    def __init__(self, http: web.BaseRequest, context: RequestContext, encode: MakeEncoder, created: int) -> None:
        self._http = http
        self._context = context
        self._encode = encode
        self._created = created
        self._encoder: Encoder | None = None

    @property
    def finished(self) -> bool:
        return self._encoder is not None and self._encoder.finished

    async def deliver(
        self, head: AnswerHead, chunks: AsyncGenerator[Chunk, None], on_chunk: OnChunk
    ) -> web.StreamResponse:
        context = self._context
        encoder = self._encoder = self._encode(context.request, context.id, head.tier, self._created)
        headers = {"x-request-id": context.id, **dict(head.headers)}
        if context.request.stream:
            return await stream_response(self._http, chunks, on_chunk, encoder, headers)
        return await whole_response(chunks, on_chunk, encoder, headers)


def _encoder(prefix: str, request: Request, request_id: str, model: str, created: int) -> AnswerEncoder:
    return AnswerEncoder(request, f"{prefix}-{request_id}", model, created)
