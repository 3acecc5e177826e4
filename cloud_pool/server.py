"""The gateway over HTTP: OpenAI's surface in front of the service, one outcome for each request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from router.errors import (
    AuthenticationFailed,
    BodyTooLarge,
    CausewayError,
    DeadlineExceeded,
    Draining,
    MethodNotAllowed,
    ModelNotFound,
    NotFound,
)
from router.openai import (
    AnswerEncoder,
    encode_error,
    encode_model,
    encode_models,
    error_event,
    parse_chat,
    parse_completion,
)
from router.types import Chunk, Request, Usage, Wishes

from .config import ServerConfig
from .inbound import read_headers
from .metrics import CONTENT_TYPE, Metrics
from .readiness import Readiness
from .service import Call, Service
from .tiers import Tier
from .tokens import Tokens

_log = logging.getLogger("causeway.cloud.server")
Parse = Callable[[bytes, Wishes], Request]


class Tally:
    """One request's measurements, closed exactly once whatever happens."""

    def __init__(self, metrics: Metrics, tier: str, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._tier = tier
        self._clock = clock
        self._began = clock()
        self._first_seen = False
        self._usage = Usage()
        self._made = 0

    def chunk(self, chunk: Chunk) -> None:
        self._made += chunk.tokens
        self._usage = chunk.usage or self._usage
        if chunk.tokens and not self._first_seen:
            self._first_seen = True
            self._metrics.first_token(self._tier, self._clock() - self._began)

    def end(self, outcome: str) -> None:
        made = self._usage.completion_tokens or self._made
        self._metrics.ended(self._tier, outcome, self._clock() - self._began, self._usage.prompt_tokens, made)


class Server:
    """The handlers. `tiers` is by name and alias."""

    def __init__(
        self,
        config: ServerConfig,
        tiers: Mapping[str, Tier],
        service: Service,
        readiness: Readiness,
        tokens: Tokens,
        metrics: Metrics,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._tiers = tiers
        self._service = service
        self._readiness = readiness
        self._tokens = tokens
        self._metrics = metrics
        self._clock = clock
        self._wall_clock = wall_clock
        self._started = int(wall_clock())
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._faults], client_max_size=self._config.max_body_bytes)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completion)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._model)
        app.router.add_get("/healthz", self._alive)
        app.router.add_get("/readyz", self._ready)
        app.router.add_get("/metrics", self._scrape)
        return app

    async def drained(self) -> None:
        """Returns when no request is running."""
        await self._idle.wait()

    # --- questions ---------------------------------------------------------------------------------------------------

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, parse_chat, "chatcmpl")

    async def _completion(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, parse_completion, "cmpl")

    async def _generate(self, http: web.Request, parse: Parse, prefix: str) -> web.StreamResponse:
        arrived = self._clock()
        device = self._tokens.device(http.headers.get("authorization", ""))
        if self.draining:
            raise Draining("this gateway is shutting down", retry_after_s=1.0)
        inbound = read_headers(http.headers)
        wishes = Wishes(client=device, deadline_ms=inbound.deadline_ms)
        request = parse(await self._body(http), wishes)
        tier = self._tier(request.model)
        call = Call(
            id=inbound.id,
            request=request,
            tier=tier,
            deadline=arrived + self._time_s(request),
            priority=inbound.priority,
            traceparent=inbound.traceparent,
        )
        self._active += 1
        self._idle.clear()
        try:
            return await self._answer(http, call, AnswerEncoder(request, f"{prefix}-{call.id}", tier.name, self._now()))
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()

    async def _answer(self, http: web.Request, call: Call, encoder: AnswerEncoder) -> web.StreamResponse:
        tally = Tally(self._metrics, call.tier.name, self._clock)
        outcome = "cancelled"
        try:
            async with aclosing(self._service.answer(call)) as chunks:
                reply = await (self._streamed if call.request.stream else self._whole)(
                    http, call, encoder, chunks, tally
                )
            outcome = "ok"
            return reply
        except CausewayError as error:
            outcome = error.code
            raise
        except _BrokenStream as broken:
            outcome = broken.error.code
            return broken.reply
        except Exception:
            outcome = "internal_error"
            raise
        finally:
            tally.end(outcome)

    async def _whole(
        self,
        http: web.Request,
        call: Call,
        encoder: AnswerEncoder,
        chunks: AsyncGenerator[Chunk, None],
        tally: Tally,
    ) -> web.StreamResponse:
        found = []
        async for chunk in chunks:
            tally.chunk(chunk)
            found.append(chunk)
        return web.Response(body=encoder.whole(found), content_type="application/json", headers=_headers(call))

    async def _streamed(
        self,
        http: web.Request,
        call: Call,
        encoder: AnswerEncoder,
        chunks: AsyncGenerator[Chunk, None],
        tally: Tally,
    ) -> web.StreamResponse:
        """Before the first chunk an error is an HTTP status; after it, the stream's last event."""
        first = await anext(chunks)
        tally.chunk(first)
        headers = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}
        reply = web.StreamResponse(headers={**headers, **_headers(call)})
        await reply.prepare(http)
        await reply.write(encoder.start() + encoder.chunk(first))
        try:
            async for chunk in chunks:
                tally.chunk(chunk)
                if data := encoder.chunk(chunk):
                    await reply.write(data)
            await reply.write(encoder.end())
        except CausewayError as error:
            _log.info("%s: the answer broke: %s %s", call.id, error.code, error.message)
            await reply.write(error_event(error))
            raise _BrokenStream(error, reply) from error
        return reply

    # --- other surfaces ----------------------------------------------------------------------------------------------

    async def _models(self, http: web.Request) -> web.Response:
        self._tokens.device(http.headers.get("authorization", ""))
        rows = [(name, "causeway", self._started) for name in self._tiers]
        return web.Response(body=encode_models(rows), content_type="application/json")

    async def _model(self, http: web.Request) -> web.Response:
        self._tokens.device(http.headers.get("authorization", ""))
        self._tier(http.match_info["name"])
        body = encode_model(http.match_info["name"], "causeway", self._started)
        return web.Response(body=body, content_type="application/json")

    async def _alive(self, http: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _ready(self, http: web.Request) -> web.Response:
        """Can answer: a real inference on each tier, kept for some seconds. One tier that answers is enough."""
        found = {} if self.draining else await self._readiness.check()
        ready = any(not fault for fault in found.values())
        tiers = {name: {"ready": not fault, "error": fault} for name, fault in found.items()}
        body = msgspec.json.encode({"ready": ready, "draining": self.draining, "tiers": tiers})
        return web.Response(body=body, status=200 if ready else 503, content_type="application/json")

    async def _scrape(self, http: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"content-type": CONTENT_TYPE})

    # --- parts -------------------------------------------------------------------------------------------------------

    def _tier(self, name: str) -> Tier:
        tier = self._tiers.get(name)
        if tier is None:
            known = ", ".join(self._tiers)
            raise ModelNotFound(
                f"The model {name[:64]!r} is no tier of this gateway. There are: {known}.", param="model"
            )
        return tier

    async def _body(self, http: web.Request) -> bytes:
        """Raises BodyTooLarge, or DeadlineExceeded when the sender is too slow."""
        try:
            return await asyncio.wait_for(http.read(), self._config.read_timeout_s)
        except web.HTTPRequestEntityTooLarge:
            limit = self._config.max_body_bytes
            raise BodyTooLarge(f"The body is larger than {limit} bytes. Send a smaller one.") from None
        except asyncio.TimeoutError:
            raise DeadlineExceeded(f"The body did not arrive within {self._config.read_timeout_s:g} s.") from None

    def _time_s(self, request: Request) -> float:
        if request.wishes.deadline_ms is None:
            return self._config.default_deadline_s
        return min(request.wishes.deadline_ms / 1000.0, self._config.default_deadline_s)

    def _now(self) -> int:
        return int(self._wall_clock())

    @web.middleware
    async def _faults(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Every fault leaves as OpenAI's error object with its own status."""
        try:
            return await handler(request)
        except CausewayError as error:
            fault = error
        except web.HTTPNotFound:
            fault = NotFound(f"There is nothing at {request.path[:128]}.")
        except web.HTTPMethodNotAllowed as error:
            fault = MethodNotAllowed(
                f"{request.method} is not possible here. Use {', '.join(sorted(error.allowed_methods))}."
            )
        except web.HTTPException:
            raise
        except Exception:
            _log.exception("a request failed unexpectedly")
            fault = CausewayError("The gateway failed.")
        self._metrics.refused(fault.code)
        return _refusal(fault)


class _BrokenStream(Exception):
    """The client has been told inside the stream already."""

    def __init__(self, error: CausewayError, reply: web.StreamResponse) -> None:
        super().__init__(error.code)
        self.error = error
        self.reply = reply


def _headers(call: Call) -> dict[str, str]:
    return {"x-request-id": call.id, "x-causeway-tier": call.tier.name}


def _refusal(error: CausewayError) -> web.Response:
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    if isinstance(error, AuthenticationFailed):
        headers["www-authenticate"] = "Bearer"
    body = encode_error(error)
    return web.Response(body=body, status=error.status, content_type="application/json", headers=headers)
