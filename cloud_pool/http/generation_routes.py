"""The routes that generate: chats, completions, embeddings and responses, each request with exactly one outcome."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import cast

from aiohttp import web

from router.errors import CausewayError, ClientGone
from router.openai import (
    AnswerEncoder,
    ResponseEcho,
    ResponseEncoder,
    parse_chat,
    parse_completion,
    parse_embedding,
    parse_response,
)
from router.types import Chunk, Request, RoutingHints, Usage

from ..accounts.ledger import Ledger, LedgerEntry
from ..cache.caching_service import CachingService
from ..cache.single_flight.reply import Reply
from ..observability.logs import REQUEST, redacted
from ..observability.metrics import Metrics
from ..observability.tracing import Trace
from ..serving.request_context import AnswerHead, RequestContext
from ..serving.service import Service
from .request_admission import Parse, RequestAdmission
from .request_metrics import RequestMetrics
from .responses import BrokenStream, Encoder, embedding_response, stream_response, whole_response

_log = logging.getLogger("causeway.cloud.server")
MakeEncoder = Callable[[Request, str, str, int], Encoder]
"""Request, its id, the model and the Unix time (s) → the encoder of its answer."""


class GenerationRoutes:
    """The handlers.

    Args:
        admission: reads and admits requests.
        service: makes embeddings.
        caching_service: answers everything else.
        ledger: usage and audit records.
        metrics: the process's metrics.
        clock: monotonic time in seconds.
        wall_clock: Unix time in seconds.
    """

    def __init__(
        self,
        admission: RequestAdmission,
        service: Service,
        caching_service: CachingService,
        ledger: Ledger,
        metrics: Metrics,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._admission = admission
        self._service = service
        self._caching_service = caching_service
        self._ledger = ledger
        self._metrics = metrics
        self._clock = clock
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
        entry = self._ledger.open(route, http.headers)
        entry.id = REQUEST.get()
        try:
            return await self._answer(http, parse, encode, entry)
        finally:
            if not entry.closes_later:
                self._ledger.close(entry)

    async def _answer(
        self, http: web.BaseRequest, parse: Parse, encode: MakeEncoder, entry: LedgerEntry
    ) -> web.StreamResponse:
        arrived_at = self._clock()
        try:
            context = await self._admission.admit(http, parse, arrived_at, entry)
        except CausewayError as error:
            entry.outcome = error.code
            self._metrics.count_rejected(error.code)
            raise
        measured = RequestMetrics(self._metrics, context.tier.name, arrived_at, self._clock)
        if context.request.kind == "embedding":
            return await self._embed(context, measured, entry)
        reply, answer = self._caching_service.reply(context, measured.first_token)
        outcome = ClientGone.code  # if the handler is cancelled
        encoder: Encoder | None = None
        try:
            async with aclosing(answer) as pieces:
                head = await anext(pieces)
                assert isinstance(head, AnswerHead)
                entry.tier = measured.tier = head.tier
                encoder = encode(context.request, context.id, head.tier, int(self._wall_clock()))
                entry.response_headers = dict(head.headers)
                headers = {"x-request-id": context.id, **entry.response_headers}
                chunks = cast("AsyncGenerator[Chunk, None]", pieces)  # only the first piece is a head
                on_chunk = partial(measured.on_chunk, reply)
                if context.request.stream:
                    response = await stream_response(http, chunks, on_chunk, encoder, headers)
                else:
                    response = await whole_response(chunks, on_chunk, encoder, headers)
            outcome = "ok"
            return response
        except BrokenStream as broken:
            outcome = broken.error.code
            if isinstance(broken.__cause__, CausewayError):
                _log.info("%s: the answer broke: %s", context.id, outcome)
            else:
                _log.error("%s: the answer broke unexpectedly: %s", context.id, redacted(broken))
            return broken.response
        except asyncio.CancelledError:
            if encoder is not None and encoder.finished:
                outcome = "ok"  # the client left without waiting for the stream's end: it has its answer
            raise
        except CausewayError as error:
            outcome = error.code
            if error.status >= 500:
                _log.warning("%s: %s: %s", context.id, measured.tier, error.code)
            raise
        except Exception:
            outcome = CausewayError.code
            raise
        finally:
            self._settle(entry, reply, measured, outcome, context.trace)

    async def _embed(self, context: RequestContext, measured: RequestMetrics, entry: LedgerEntry) -> web.StreamResponse:
        reply = Reply(measured.first_token, "")
        outcome = ClientGone.code  # if the handler is cancelled
        try:
            head, embeddings = await self._service.embed(context)
            measured.on_chunk(reply, Chunk(usage=embeddings.usage))
            entry.response_headers = dict(head.headers)
            headers = {"x-request-id": context.id, **entry.response_headers}
            response = embedding_response(context.request, embeddings, head.tier, headers)
            outcome = "ok"
            return response
        except CausewayError as error:
            outcome = error.code
            raise
        finally:
            self._settle(entry, reply, measured, outcome, context.trace)

    def _settle(
        self, entry: LedgerEntry, reply: Reply, measured: RequestMetrics, outcome: str, trace: Trace | None
    ) -> None:
        entry.outcome, entry.cache, entry.billable = outcome, reply.status, reply.billable
        measured.stop()

        def on_usage(usage: Usage) -> None:
            entry.usage = usage
            measured.record(outcome, usage)
            if trace is not None:
                trace.end(tier=measured.tier, outcome=outcome, usage=usage, headers=entry.response_headers)
            if entry.closes_later:
                self._ledger.close(entry)

        entry.closes_later = not reply.settle(measured.usage, on_usage)


def _encoder(prefix: str, request: Request, request_id: str, model: str, created: int) -> AnswerEncoder:
    return AnswerEncoder(request, f"{prefix}-{request_id}", model, created)
