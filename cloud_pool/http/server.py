"""The gateway over HTTP: routes in front of the service, and exactly one outcome for each request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from contextlib import aclosing
from functools import partial
from typing import cast

from aiohttp import hdrs, web

from router.errors import CausewayError, ClientGone, Draining, MethodNotAllowed, NotFound
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

from ..accounts.identity.authenticator import Authenticator
from ..accounts.identity.principal import Principal
from ..accounts.ledger import Ledger, LedgerEntry
from ..accounts.model_access import AllowedTiers, allowed_tiers, find_tier
from ..accounts.tenants.accounting import BYTES_PER_TOKEN
from ..cache.caching_service import CachingService
from ..cache.single_flight.reply import Reply
from ..config.schema import ServerConfig
from ..config.tiers import Tier
from ..observability.logs import REQUEST, redacted
from ..observability.metrics import Metrics
from ..observability.tracing import Trace, Tracing
from ..serving.request_context import AnswerHead, RequestContext
from ..serving.service import Service
from .body_memory import BodyMemory
from .info_routes import MODELS, InfoRoutes
from .readiness import Readiness
from .request_metrics import RequestMetrics
from .request_reader import read_body, read_headers, read_request_id
from .responses import BrokenStream, Encoder, embedding_response, error_response, stream_response, whole_response

_log = logging.getLogger("causeway.cloud.server")
Parse = Callable[[bytes, RoutingHints], Request]
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
MakeEncoder = Callable[[Request, str, str, int], Encoder]
"""Request, its id, the model and the Unix time (s) → the encoder of its answer."""


class Server:
    """The request handlers.

    Args:
        config: the `server` section.
        tiers: by name and alias.
        service: answers requests.
        readiness: for /readyz.
        authenticator: authenticates clients.
        ledger: limits, usage and audit records.
        metrics: the process's metrics.
        caching_service: in front of `service`; None: no cache.
        critical_tenants: tenants whose requests are all critical.
        jobs: returns the handler of a job route, or None for any other path.
        tracing: None without a collector.
        bodies: bounds the bodies in memory.
        clock: monotonic time in seconds.
        wall_clock: Unix time in seconds.
    """

    def __init__(
        self,
        config: ServerConfig,
        tiers: Mapping[str, Tier],
        service: Service,
        readiness: Readiness,
        authenticator: Authenticator,
        ledger: Ledger,
        metrics: Metrics,
        *,
        caching_service: CachingService | None = None,
        critical_tenants: Collection[str] = (),
        jobs: Callable[[web.BaseRequest], Handler | None] = lambda _: None,
        tracing: Tracing | None = None,
        bodies: BodyMemory | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._tiers = tiers
        self._jobs = jobs
        self._tracing = tracing
        self._bodies = bodies or BodyMemory()
        self._critical_tenants = critical_tenants
        self._service = service
        self._caching_service = caching_service or CachingService(None, service.answer)
        self._authenticator = authenticator
        self._ledger = ledger
        self._metrics = metrics
        self._clock = clock
        self._wall_clock = wall_clock
        self._info = info = InfoRoutes(tiers, readiness, created=int(wall_clock()))
        self._routes: Mapping[str, tuple[str, Handler]] = {
            "/v1/chat/completions": (hdrs.METH_POST, self._chat),
            "/v1/completions": (hdrs.METH_POST, self._completion),
            "/v1/embeddings": (hdrs.METH_POST, self._embedding),
            "/v1/responses": (hdrs.METH_POST, self._response),
            "/v1/models": (hdrs.METH_GET, self._models),
            "/healthz": (hdrs.METH_GET, info.healthz),
            "/health": (hdrs.METH_GET, info.healthz),  # vLLM's name
            "/readyz": (hdrs.METH_GET, info.readyz),
        }

    @property
    def draining(self) -> bool:
        return self._info.draining

    def begin_draining(self) -> None:
        """Accept no new requests; /readyz reports it."""
        self._info.draining = True

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        """Handle one request. Every error becomes OpenAI's error object with its own status and the request's id."""
        request_id = read_request_id(http.headers)
        REQUEST.set(request_id)  # the requests of a connection share a task
        try:
            return await self._handler(http)(http)
        except CausewayError as error:
            return error_response(error, request_id)
        except Exception as error:
            _log.error("a request failed unexpectedly: %s", redacted(error))
            return error_response(CausewayError("The gateway failed."), request_id)
        finally:
            self._bodies.release(http)

    def _handler(self, http: web.BaseRequest) -> Handler:
        """Raises NotFound or MethodNotAllowed."""
        method, handler = self._routes.get(http.path, ("", None))
        if handler is None and http.path.startswith(MODELS):
            method, handler = hdrs.METH_GET, self._model
        if handler is None and (job := self._jobs(http)) is not None:
            return job
        if handler is None:
            raise NotFound(f"There is nothing at {http.path[:128]}.")
        if http.method != method:
            raise MethodNotAllowed(f"{http.method[:20]} is not allowed here. Use {method}.", allow=method)
        return handler

    async def _models(self, http: web.BaseRequest) -> web.StreamResponse:
        return self._info.models(self._allowed(self._principal(http)))

    async def _model(self, http: web.BaseRequest) -> web.StreamResponse:
        return self._info.model(http.path, self._allowed(self._principal(http)))

    def _allowed(self, principal: Principal) -> AllowedTiers:
        return allowed_tiers(self._tiers, principal, self._ledger.limits(principal))

    async def _chat(self, http: web.BaseRequest) -> web.StreamResponse:
        return await self._generate(http, partial(parse_chat, resumes=True), partial(_encoder, "chatcmpl"), "chat")

    async def _completion(self, http: web.BaseRequest) -> web.StreamResponse:
        parse = partial(parse_completion, resumes=True)
        return await self._generate(http, parse, partial(_encoder, "cmpl"), "completion")

    async def _embedding(self, http: web.BaseRequest) -> web.StreamResponse:
        return await self._generate(http, parse_embedding, partial(_encoder, "emb"), "embedding")

    async def _response(self, http: web.BaseRequest) -> web.StreamResponse:
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
            context = await self._context(http, parse, arrived_at, entry)
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

    async def _context(
        self, http: web.BaseRequest, parse: Parse, arrived_at: float, entry: LedgerEntry
    ) -> RequestContext:
        """Authenticate, parse and admit the request. Raises CausewayError."""
        principal = entry.principal = self._principal(http)
        principal.require("chat")
        if self._info.draining:
            raise Draining("this gateway is shutting down", retry_after_s=1.0)
        inbound = read_headers(http.headers, entry.id)
        limits = self._ledger.limits(principal)
        max_bytes, timeout_s = limits.body_bytes(self._config.max_body_bytes), self._config.read_timeout_s
        body = await read_body(http, max_bytes, timeout_s, self._bodies, principal.tenant)
        parsed = parse(body, RoutingHints(client=principal.device, deadline_ms=inbound.deadline_ms, tags=inbound.tags))
        allowed = self._allowed(principal)
        tier = find_tier(self._tiers, parsed.model, allowed)
        principal.grants.require_modalities(parsed)
        limits.check_request(parsed)
        request = limits.bounded(parsed)
        entry.tier = tier.name
        tier.check_sequences(request)
        deadline_s = self._deadline_s(request)
        await self._ledger.admit(
            entry, principal, request, len(body), max_tokens=tier.max_tokens, lifetime_s=deadline_s
        )
        return RequestContext(
            id=inbound.id,
            request=request,
            tier=tier,
            deadline=arrived_at + deadline_s,
            priority=principal.grants.bounded_priority(inbound.priority),
            traceparent=inbound.traceparent,
            trace=None if self._tracing is None else self._tracing.begin(request, inbound.id, inbound.traceparent),
            tenant=principal.tenant,
            weight=limits.weight,
            tokens=len(body) / BYTES_PER_TOKEN * request.n / request.sequences + _answer_tokens(request, tier),
            critical=(inbound.critical and principal.grants.critical) or principal.tenant in self._critical_tenants,
            allowed_tiers=allowed,
        )

    def _principal(self, http: web.BaseRequest) -> Principal:
        """Raises AuthenticationFailed or IdentityUnavailable."""
        return self._authenticator.principal(http.headers.get(hdrs.AUTHORIZATION, ""))

    def _deadline_s(self, request: Request) -> float:
        if request.hints.deadline_ms is None:
            return self._config.default_deadline_s
        return min(request.hints.deadline_ms / 1000.0, self._config.default_deadline_s)


def _encoder(prefix: str, request: Request, request_id: str, model: str, created: int) -> AnswerEncoder:
    return AnswerEncoder(request, f"{prefix}-{request_id}", model, created)


def _answer_tokens(request: Request, tier: Tier) -> int:
    """The most tokens that the answer may have."""
    return 0 if request.kind == "embedding" else request.max_tokens or tier.max_tokens
