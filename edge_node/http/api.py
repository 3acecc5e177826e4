"""The paths of the HTTP API: OpenAI's, explanations and health. Every error is sent as OpenAI's error object.

POST /v1/chat/completions /v1/completions /v1/embeddings     an answer
POST /v1/responses                                           the same, as a Response object; nothing is stored
POST /v1/route                                               the decision for such a request, without running it
GET  /v1/models[/{id}]  /v1/decisions[/{id}]                 model names; records of past requests
GET  /healthz /readyz /metrics                               liveness, readiness, Prometheus; these need no API key
POST /v1/audio/transcriptions /v1/audio/speech               see `modalities.api`
POST GET /v1/jobs, GET DELETE /v1/jobs/{id}                  see `jobs`
GET  /console…                                               the page, see `console.routes`
GET  /health                                                 the same as /healthz, the name that vLLM uses
GET  /openapi.json                                           the OpenAPI document of all of these
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import random
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, get_args

import msgspec
from aiohttp import web

from router.api.document import OPENAPI_PATH
from router.decision.decide import model_names
from router.errors import CausewayError, ClientGone, InvalidRequest, MethodNotAllowed, ModelNotFound, NotFound
from router.openai import encode_model, encode_models
from router.types import AUTO, Request, Route

from ..clock import Clock
from ..observability.logs import redacted
from ..observability.metrics import CONTENT_TYPE, Metrics
from ..serving.generation import policy_label
from ..serving.request_context import RequestContext, Status
from ..serving.service import Service
from ..storage.decisions import MAX_QUERY_LIMIT, DecisionQuery, DecisionStore
from ..storage.policies import PolicyReport, PolicyStore
from .request_reader import Endpoint, RequestReader, traceparent_of
from .responses import JSON, SERVER, HttpReplyWriter, error_response

if TYPE_CHECKING:
    from ..observability.tracing import RequestTrace, RequestTracer

log = logging.getLogger(__name__)

_ANSWER_PATHS = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"),
        *("/v1/audio/transcriptions", "/v1/audio/speech"),
    }
)
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
AsJob = Callable[[Endpoint, web.BaseRequest], Awaitable[web.StreamResponse | None]]
_ID = "{id}"  # one step of a path
_ANY_ID = "{id:.*}"  # all the rest of it
_encoder = msgspec.json.Encoder()
_random = random.Random(os.urandom(32))


class Readiness(msgspec.Struct, frozen=True):
    """The body of `/readyz`."""

    ready: bool
    waiting_for: tuple[str, ...]  # targets, while none of them can answer
    problems: tuple[str, ...]
    policy: PolicyReport
    edge: str  # the engine's state, "" without one
    cloud: str  # the breaker's state, "" without one
    uptime_s: float


class Api:
    """Routes requests to handlers. `readiness` is called for each probe and must be cheap.

    Args:
        more_paths: methods and handler of further paths, such as the console's; `{id}` stands for one step of a path.
        as_job: answers a request with the header `Prefer`; None where that asks for nothing.

    Attributes:
        paths: the methods of each path.
    """

    def __init__(
        self,
        *,
        service: Service,
        reader: RequestReader,
        policies: PolicyStore,
        decisions: DecisionStore,
        metrics: Metrics,
        clock: Clock,
        readiness: Callable[[], Readiness],
        tracing: RequestTracer | None = None,
        more_paths: Mapping[str, tuple[str, Handler]] = {},
        as_job: AsJob | None = None,
    ) -> None:
        self._service = service
        self._reader = reader
        self._policies = policies
        self._decisions = decisions
        self._metrics = metrics
        self._clock = clock
        self._readiness = readiness
        self._tracing = tracing
        self._as_job = as_job
        self._started = int(clock.unix())
        self._document = b""
        paths: Mapping[str, tuple[str, Handler]] = {
            "/v1/chat/completions": ("POST", functools.partial(self._answer, "chat")),
            "/v1/completions": ("POST", functools.partial(self._answer, "completion")),
            "/v1/embeddings": ("POST", functools.partial(self._answer, "embedding")),
            "/v1/responses": ("POST", functools.partial(self._answer, "response")),
            "/v1/route": ("POST", self._explain),
            "/v1/models": ("GET", self._models),
            f"/v1/models/{_ANY_ID}": ("GET", self._model),
            "/v1/decisions": ("GET", self._find_decisions),
            "/v1/decisions/{id}": ("GET", self._decision),
            "/healthz": ("GET", self._health),
            "/health": ("GET", self._health),
            "/readyz": ("GET", self._ready),
            "/metrics": ("GET", self._prometheus),
            OPENAPI_PATH: ("GET", self._openapi),
            **more_paths,
        }
        self.paths = {path.replace(_ANY_ID, _ID): methods for path, (methods, _) in paths.items()}
        self._paths = {path: found for path, found in paths.items() if "{" not in path}
        self._patterns = [(_pattern(path), found) for path, found in paths.items() if "{" in path]

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        """Answer one request. Raises CancelledError only, when the client disconnects."""
        try:
            return await self._handler(http)(http)
        except ClientGone:
            raise asyncio.CancelledError from None
        except CausewayError as error:
            if http.path in _ANSWER_PATHS:
                self._metrics.request_rejected(error.code)
            return _refusal(http, error)
        except Exception as failure:
            log.error("%s failed unexpectedly: %s", http.path, redacted(failure))
            return _refusal(http, CausewayError("internal error"))

    def _handler(self, http: web.BaseRequest) -> Handler:
        """Raises NotFound or MethodNotAllowed."""
        found = self._paths.get(http.raw_path) or self._paths.get(http.path)
        if found is None:
            found = next((one for pattern, one in self._patterns if pattern.fullmatch(http.path)), None)
        if found is None:
            raise NotFound(f"there is nothing at {http.path[:200]}")
        methods, handler = found
        if http.method != methods and http.method not in methods.split(", "):
            raise MethodNotAllowed(f"{http.path[:200]} takes {methods}, not {http.method[:20]}", allow=methods)
        return handler

    # --- answers -----------------------------------------------------------------------------------------------------

    async def _answer(self, kind: Endpoint, http: web.BaseRequest) -> web.StreamResponse:
        arrived = self._clock.monotonic()
        if "Prefer" in http.headers and self._as_job is not None:
            response = await self._as_job(kind, http)
            if response is not None:
                return response
        parsed = await self._reader.request(http, kind)
        request, decision_id = parsed.request, new_decision_id()
        traceparent, trace = self._traced(request, http)
        created = int(self._clock.unix())
        reply = HttpReplyWriter(request, http, id=decision_id, created=created, echo=parsed.echo)
        try:
            await self._service.answer(
                RequestContext(
                    request,
                    reply,
                    id=decision_id,
                    arrived=arrived,
                    traceparent=traceparent,
                    trace=trace,
                    memo=parsed.memo,
                )
            )
            return reply.response
        except ClientGone:
            raise
        except CausewayError as error:
            return await reply.fail(error, policy=policy_label(self._policies.active))

    def _traced(self, request: Request, http: web.BaseRequest) -> tuple[str, RequestTrace | None]:
        traceparent = traceparent_of(http.headers)
        if self._tracing is None:
            return traceparent, None
        return traceparent, self._tracing.begin(request, traceparent, self._clock.unix())

    async def _explain(self, http: web.BaseRequest) -> web.StreamResponse:
        parsed = await self._reader.request(http, None)
        return _json(await self._service.explain(parsed.request))

    # --- models and decisions -------------------------------------------------------------------------------------

    async def _models(self, http: web.BaseRequest) -> web.StreamResponse:
        self._reader.caller(http)
        names = model_names(self._policies.active)
        return _body(encode_models([(name, self._owner(name), self._started) for name in names]))

    async def _model(self, http: web.BaseRequest) -> web.StreamResponse:
        self._reader.caller(http)
        name = http.path.removeprefix("/v1/models/")
        if name not in model_names(self._policies.active):
            raise ModelNotFound(f"the model `{name[:100]}` does not exist here", param="model")
        return _body(encode_model(name, self._owner(name), self._started))

    def _owner(self, name: str) -> str:
        """`owned_by` of a model: causeway (auto), edge or cloud."""
        locations = {target.name: target.at for target in self._policies.active.offered}
        return "causeway" if name == AUTO else locations[name]

    async def _find_decisions(self, http: web.BaseRequest) -> web.StreamResponse:
        self._reader.caller(http)
        return _json({"object": "list", "data": await self._decisions.find(_query(http.query))})

    async def _decision(self, http: web.BaseRequest) -> web.StreamResponse:
        self._reader.caller(http)
        decision_id = http.path.removeprefix("/v1/decisions/")
        record = await self._decisions.get(decision_id)
        if record is None:
            raise NotFound(f"no decision {decision_id[:100]!r}; old ones are deleted")
        return _json(record)

    # --- health ------------------------------------------------------------------------------------------------------

    async def _health(self, http: web.BaseRequest) -> web.StreamResponse:
        """Alive while routing works; whether a target can answer is reported by `/readyz`."""
        self._service.self_check()
        return _json({"status": "ok", "uptime_s": self._readiness().uptime_s})

    async def _ready(self, http: web.BaseRequest) -> web.StreamResponse:
        readiness = self._readiness()
        return _json(readiness, status=200 if readiness.ready else 503)

    async def _prometheus(self, http: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE, "Server": SERVER})

    async def _openapi(self, http: web.BaseRequest) -> web.StreamResponse:
        if not self._document:
            self._document = await asyncio.to_thread(_encoded_document)
        return _body(self._document)


def _pattern(path: str) -> re.Pattern[str]:
    return re.compile(path.replace(_ID, "[^/]+").replace(_ANY_ID, ".*"))


def _refusal(http: web.BaseRequest, error: CausewayError) -> web.Response:
    """Return the answer to a request that has no decision, and log both under one id."""
    request_id = new_decision_id()
    log.debug("%s refused: %s (%s) request=%s", http.path, error.status, error.code, request_id)
    return error_response(error, {"x-request-id": request_id})


def _encoded_document() -> bytes:
    # Imported only when needed: hardly a daemon is ever asked for it, and it names what is imported lazily elsewhere.
    from ..openapi import edge_document

    return _encoder.encode(edge_document())


def new_decision_id() -> str:
    """A decision's id: unique, but not secret."""
    return f"{_random.getrandbits(96):024x}"


def _query(filters: Mapping[str, str]) -> DecisionQuery:
    """Raises InvalidRequest, also for an unknown filter."""
    for name in filters:
        if name not in DecisionQuery.__struct_fields__:
            known = ", ".join(DecisionQuery.__struct_fields__)
            raise InvalidRequest(f"there is no filter {name[:64]!r}; known: {known}", param=name[:64])
    for name, known_values in (("route", get_args(Route)), ("status", get_args(Status))):
        if filters.get(name, "") not in ("", *known_values):
            raise InvalidRequest(f"`{name}` must be one of {', '.join(known_values)}", param=name)
    return DecisionQuery(
        route=filters.get("route", ""),
        target=filters.get("target", ""),
        status=filters.get("status", ""),
        since=_number(filters, "since", 0.0, float("inf"), 0.0),
        limit=int(_number(filters, "limit", 1.0, MAX_QUERY_LIMIT, 100.0)),
    )


def _number(filters: Mapping[str, str], name: str, least: float, most: float, default: float) -> float:
    text = filters.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise InvalidRequest(f"`{name}` must be a number from {least:g} to {most:g}, not {text[:32]!r}", param=name)
    return value


def _json(value: object, *, status: int = 200) -> web.Response:
    return _body(_encoder.encode(value), status=status)


def _body(body: bytes, *, status: int = 200) -> web.Response:
    return web.Response(status=status, body=body, headers={"Content-Type": JSON, "Server": SERVER})
