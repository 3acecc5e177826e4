"""The gateway over HTTP: OpenAI's surface in front of the service, one outcome for each request."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from contextlib import aclosing
from functools import partial
from typing import cast

import msgspec
from aiohttp import hdrs, web

from router.errors import CausewayError, ClientGone, Draining, MethodNotAllowed, ModelNotFound, NotFound
from router.openai import AnswerEncoder, encode_model, encode_models, parse_chat, parse_completion
from router.types import Chunk, Request, RoutingHints, Usage

from ..accounts.identity.authenticator import Authenticator
from ..accounts.identity.principal import Principal
from ..accounts.ledger import Ledger, LedgerEntry
from ..accounts.tenants.accounting import BYTES_PER_TOKEN
from ..cache.caching_service import CachingService
from ..cache.single_flight.reply import Reply
from ..config.schema import ServerConfig
from ..config.tiers import Tier
from ..observability.logs import REQUEST
from ..observability.metrics import CONTENT_TYPE, Metrics
from ..observability.tracing import Trace, Tracing
from ..serving.request_context import AnswerHead, RequestContext
from ..serving.service import Service
from .readiness import Readiness
from .request_reader import read_body, read_headers
from .responses import JSON, BrokenStream, refusal, streamed, whole

_log = logging.getLogger("causeway.cloud.server")
Parse = Callable[[bytes, RoutingHints], Request]
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Server:
    """The handlers. `tiers` is by name and alias; `jobs` knows its own paths. `draining`: no new question is taken."""

    def __init__(
        self,
        config: ServerConfig,
        tiers: Mapping[str, Tier],
        service: Service,
        readiness: Readiness,
        gate: Authenticator,
        ledger: Ledger,
        metrics: Metrics,
        *,
        caching_service: CachingService | None = None,
        critical_tenants: Collection[str] = (),
        jobs: Callable[[web.BaseRequest], Handler | None] = lambda _: None,
        tracing: Tracing | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._jobs = jobs
        self._tracing = tracing
        self._critical_tenants = critical_tenants
        self._tiers = tiers
        self._front = caching_service or CachingService(None, service.answer)
        self._readiness = readiness
        self._gate = gate
        self._ledger = ledger
        self._metrics = metrics
        self._clock = clock
        self._wall_clock = wall_clock
        self._started = int(wall_clock())
        self.draining = False
        self._routes: Mapping[str, tuple[str, Handler]] = {
            "/v1/chat/completions": (hdrs.METH_POST, self._chat),
            "/v1/completions": (hdrs.METH_POST, self._completion),
            "/v1/models": (hdrs.METH_GET, self._models),
            "/healthz": (hdrs.METH_GET, self._alive),
            "/readyz": (hdrs.METH_GET, self._ready),
            "/metrics": (hdrs.METH_GET, self._scrape),
        }

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        """Every fault leaves as OpenAI's error object with its own status."""
        try:
            return await self._handler(http)(http)
        except CausewayError as error:
            return refusal(error)
        except Exception:
            _log.exception("a request failed unexpectedly")
            return refusal(CausewayError("The gateway failed."))

    def _handler(self, http: web.BaseRequest) -> Handler:
        """Raises NotFound or MethodNotAllowed."""
        method, handler = self._routes.get(http.path, ("", None))
        if handler is None and http.path.startswith("/v1/models/"):
            method, handler = hdrs.METH_GET, self._model
        if handler is None and (job := self._jobs(http)) is not None:
            return job
        if handler is None:
            raise NotFound(f"There is nothing at {http.path[:128]}.")
        if http.method != method:
            raise MethodNotAllowed(f"{http.method} is not possible here. Use {method}.")
        return handler

    # --- questions ---------------------------------------------------------------------------------------------------

    async def _chat(self, http: web.BaseRequest) -> web.StreamResponse:
        return await self._generate(http, partial(parse_chat, resumes=True), "chatcmpl", "chat")

    async def _completion(self, http: web.BaseRequest) -> web.StreamResponse:
        return await self._generate(http, partial(parse_completion, resumes=True), "cmpl", "completion")

    async def _generate(self, http: web.BaseRequest, parse: Parse, prefix: str, route: str) -> web.StreamResponse:
        REQUEST.set("")  # a connection's requests share their task
        entry = self._ledger.open(route, http.headers)
        try:
            return await self._recorded(http, parse, prefix, entry)
        finally:
            if not entry.closes_later:
                self._ledger.close(entry)

    async def _recorded(
        self, http: web.BaseRequest, parse: Parse, prefix: str, entry: LedgerEntry
    ) -> web.StreamResponse:
        arrived = self._clock()
        try:
            call = await self._call(http, parse, arrived, entry)
        except CausewayError as error:
            entry.outcome = error.code
            self._metrics.count_rejected(error.code)
            raise
        tally = RequestMetrics(self._metrics, call.tier.name, arrived, self._clock)
        reply, answer = self._front.reply(call, tally.first_token)
        outcome = ClientGone.code  # what it is when the handler is cancelled
        try:
            async with aclosing(answer) as pieces:
                head = await anext(pieces)
                assert isinstance(head, AnswerHead)
                entry.tier = tally.tier = head.tier
                encoder = AnswerEncoder(call.request, f"{prefix}-{call.id}", head.tier, int(self._wall_clock()))
                entry.response_headers = dict(head.headers)
                headers = {"x-request-id": call.id, **entry.response_headers}
                chunks = cast("AsyncGenerator[Chunk, None]", pieces)  # the Head comes once, and first
                if call.request.stream:
                    response = await streamed(http, chunks, partial(tally.seen, reply), encoder, headers)
                else:
                    response = await whole(chunks, partial(tally.seen, reply), encoder, headers)
            outcome = "ok"
            return response
        except BrokenStream as broken:
            outcome = broken.error.code
            _log.info("%s: the answer broke: %s (%s)", call.id, outcome, broken.error.message)
            return broken.response
        except CausewayError as error:
            outcome = error.code
            if error.status >= 500:
                _log.warning("%s: %s: %s (%s)", call.id, tally.tier, error.code, error.message)
            raise
        except Exception:
            outcome = CausewayError.code
            raise
        finally:
            self._settle(entry, reply, tally, outcome, call.trace)

    def _settle(
        self, entry: LedgerEntry, reply: Reply, tally: RequestMetrics, outcome: str, trace: Trace | None
    ) -> None:
        entry.outcome, entry.cache, entry.billable = outcome, reply.status, reply.billable
        tally.stop()

        def used(usage: Usage) -> None:
            entry.usage = usage
            tally.end(outcome, usage)
            if trace is not None:
                trace.end(tier=tally.tier, outcome=outcome, usage=usage, headers=entry.response_headers)
            if entry.closes_later:
                self._ledger.close(entry)

        entry.closes_later = not reply.settle(tally.usage, used)

    async def _call(self, http: web.BaseRequest, parse: Parse, arrived: float, entry: LedgerEntry) -> RequestContext:
        """Raises CausewayError: who asks, how, and for what, is the caller's fault."""
        principal = entry.principal = self._principal(http)
        principal.require("chat")
        if self.draining:
            raise Draining("this gateway is shutting down", retry_after_s=1.0)
        inbound = read_headers(http.headers)
        entry.id = inbound.id
        REQUEST.set(inbound.id)
        limits = self._ledger.limits(principal)
        body = await read_body(http, limits.body_bytes(self._config.max_body_bytes), self._config.read_timeout_s)
        asked = parse(body, RoutingHints(client=principal.device, deadline_ms=inbound.deadline_ms, tags=inbound.tags))
        limits.check_request(asked)
        request = limits.bounded(asked)
        tier = self._tier(request.model)
        entry.tier = tier.name
        await self._ledger.admit(entry, principal, request, len(body))
        return RequestContext(
            id=inbound.id,
            request=request,
            tier=tier,
            deadline=arrived + self._time_s(request),
            priority=inbound.priority,
            traceparent=inbound.traceparent,
            trace=None if self._tracing is None else self._tracing.begin(request, inbound.id, inbound.traceparent),
            tenant=principal.tenant,
            weight=limits.weight,
            tokens=len(body) / BYTES_PER_TOKEN + (request.max_tokens or tier.max_tokens),
            critical=inbound.critical or principal.tenant in self._critical_tenants,
        )

    def _principal(self, http: web.BaseRequest) -> Principal:
        """Raises AuthenticationFailed or IdentityUnavailable."""
        return self._gate.principal(http.headers.get(hdrs.AUTHORIZATION, ""))

    def _tier(self, name: str) -> Tier:
        tier = self._tiers.get(name)
        if tier is None:
            known = ", ".join(self._tiers)
            raise ModelNotFound(f"The model {name[:64]!r} is no tier here. There are: {known}.", param="model")
        return tier

    def _time_s(self, request: Request) -> float:
        if request.hints.deadline_ms is None:
            return self._config.default_deadline_s
        return min(request.hints.deadline_ms / 1000.0, self._config.default_deadline_s)

    # --- other surfaces ----------------------------------------------------------------------------------------------

    async def _models(self, http: web.BaseRequest) -> web.StreamResponse:
        self._principal(http)
        rows = [(name, "causeway", self._started) for name in self._tiers]
        return web.Response(body=encode_models(rows), content_type=JSON)

    async def _model(self, http: web.BaseRequest) -> web.StreamResponse:
        self._principal(http)
        name = http.path.removeprefix("/v1/models/")
        self._tier(name)
        return web.Response(body=encode_model(name, "causeway", self._started), content_type=JSON)

    async def _alive(self, http: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=b'{"status":"ok"}', content_type=JSON)

    async def _ready(self, http: web.BaseRequest) -> web.StreamResponse:
        """Can answer: a real inference on each endpoint, kept for some seconds. One that answers is enough."""
        found = {} if self.draining else await self._readiness.check()
        ready = any(tier.ready for tier in found.values())
        tiers = {
            name: {"ready": tier.ready, "error": tier.error, "endpoints": tier.endpoints}
            for name, tier in found.items()
        }
        body = msgspec.json.encode({"ready": ready, "draining": self.draining, "tiers": tiers})
        return web.Response(body=body, status=200 if ready else 503, content_type=JSON)

    async def _scrape(self, http: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=self._metrics.text(), headers={hdrs.CONTENT_TYPE: CONTENT_TYPE})


class RequestMetrics:
    """One request's measurements, told exactly once, whatever becomes of it."""

    def __init__(self, metrics: Metrics, tier: str, arrived: float, clock: Callable[[], float]) -> None:
        self.tier = tier  # who answers, as far as is known
        self._metrics = metrics
        self._arrived = arrived
        self._clock = clock
        self._ended: float | None = None
        self._usage = Usage()
        self._made = 0
        self._told = False
        self._told_at = 0.0

    def first_token(self, tier: str) -> None:
        """The first time counts."""
        if not self._told:
            self._told, self.tier, self._told_at = True, tier or self.tier, self._clock()
            self._metrics.observe_first_token(self.tier, self._told_at - self._arrived)

    def seen(self, reply: Reply, chunk: Chunk) -> None:
        if chunk.tokens:
            if not self._told and reply.billable:
                self.first_token(self.tier)
            self._made += chunk.tokens
        if chunk.usage is not None:
            self._usage = chunk.usage

    def stop(self) -> None:
        """The client has its answer, or none."""
        self._ended = self._clock()

    @property
    def usage(self) -> Usage:
        """What was used, as far as the model has said it."""
        made = self._usage.completion_tokens or self._made
        return Usage(self._usage.prompt_tokens, made, self._usage.cached_tokens)

    def end(self, outcome: str, used: Usage) -> None:
        """Exactly once. `used`: of the tier, on this request's account."""
        ended = self._clock() if self._ended is None else self._ended
        if self._told and self._made > 1:
            self._metrics.observe_later_tokens(self.tier, ended - self._told_at, self._made - 1)
        self._metrics.observe_end(self.tier, outcome, ended - self._arrived, used.prompt_tokens, used.completion_tokens)
