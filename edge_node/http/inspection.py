"""The paths that describe this device: its models, past decisions, health, metrics, the OpenAPI document.

    GET  /v1/models[/{id}]      model names, in the form of the client's dialect
    GET  /v1/decisions[/{id}]   records of past requests: the caller's own, or all with the right `decisions`
    GET  /healthz /readyz       liveness (/health is the same, under vLLM's name) and readiness
    GET  /metrics               Prometheus
    GET  /openapi.json          the OpenAPI document of all paths

Health, metrics and the document need no API key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Final, Literal, get_args

import msgspec

from causeway_server.router.anthropic.replies import VERSION_HEADER, model_info, model_page
from causeway_server.router.api.document import OPENAPI_PATH
from causeway_server.router.errors import InvalidRequest, ModelNotFound, NotFound, PermissionDenied
from causeway_server.router.openai.answer import ModelObject, ModelUse, encode_model, encode_models
from causeway_server.router.serving.metrics import CONTENT_TYPE
from causeway_server.router.serving.request import AiohttpRequest, HttpExchange, read_choice
from causeway_server.router.serving.responses import Handler, ServerResponse, body_response, json_response
from causeway_server.router.types import AUTO, Route

from ..clock import Clock
from ..observability.metrics import Metrics
from ..serving.requests import Status
from ..serving.service import Service
from ..storage.decisions import MAX_QUERY_LIMIT, DecisionQuery, DecisionStore
from ..storage.policies import PolicyReport, PolicyStore
from .api import Caller, RequestReader

PLAIN_PATHS: Final = (("GET", "/v1/models"), ("GET", "/metrics"))
"""Further requests that are answered without aiohttp."""
_encoder = msgspec.json.Encoder()


Reachability = Literal["reachable", "unreachable", "unknown"]
"""State of the cloud; unknown: not probed yet."""


class CloudState(msgspec.Struct, frozen=True):
    """The state of one of several clouds."""

    name: str
    region: str
    state: Reachability


class Readiness(msgspec.Struct, frozen=True):
    """The body of `/readyz`."""

    ready: bool
    waiting_for: tuple[str, ...]  # targets, while none of them can answer
    problems: tuple[str, ...]
    policy: PolicyReport
    edge: str  # the engine's state; "" without an engine
    cloud: Reachability | Literal[""]  # of the best of the clouds; "" without a cloud
    uptime_s: float
    clouds: tuple[CloudState, ...] = ()  # on a device with several


@dataclass(eq=False, repr=False, kw_only=True)
class Inspection:
    """The request handlers that describe this device. `readiness`: called for each probe, must be cheap; `describe`:
    returns the OpenAPI document; called at its first request.
    """

    service: Service
    reader: RequestReader
    policies: PolicyStore
    decisions: DecisionStore
    metrics: Metrics
    clock: Clock
    readiness: Callable[[], Readiness]
    describe: Callable[[], object]
    _document: bytes = b""

    def __post_init__(self) -> None:
        self._started = int(self.clock.unix())

    def paths(self) -> Mapping[str, tuple[str, Handler]]:
        return {
            "/v1/models": ("GET", self._models),
            "/v1/models/{id:.*}": ("GET", self._model),
            "/v1/decisions": ("GET", self._find_decisions),
            "/v1/decisions/{id}": ("GET", self._decision),
            "/healthz": ("GET", self._health),
            "/health": ("GET", self._health),
            "/readyz": ("GET", self._ready),
            "/metrics": ("GET", self._prometheus),
            OPENAPI_PATH: ("GET", self._openapi),
        }

    async def _models(self, http: HttpExchange) -> ServerResponse:
        self.reader.caller(http)
        models = [self._object(name) for name in self.policies.active.model_names]
        if VERSION_HEADER in http.headers:
            return json_response(model_page(models, http.query))
        return body_response(encode_models(models))

    async def _model(self, http: AiohttpRequest) -> ServerResponse:
        self.reader.caller(http)
        name = http.path.removeprefix("/v1/models/")
        if name not in self.policies.active.model_names:
            raise ModelNotFound(f"The model `{name[:100]}` does not exist on this device.", param="model")
        if VERSION_HEADER in http.headers:
            return json_response(model_info(self._object(name)))
        return body_response(encode_model(self._object(name)))

    def _object(self, name: str) -> ModelObject:
        """Return the API's view of a model, owned by causeway (auto), edge or cloud."""
        locations = {target.name: target.at for target in self.policies.active.offered}
        owner = "causeway" if name == AUTO else locations[name]
        return ModelObject(name, owner, self._started, causeway=ModelUse(store=False))

    async def _find_decisions(self, http: AiohttpRequest) -> ServerResponse:
        caller = self.reader.caller(http)
        records = await self.decisions.find(_query(http.query, caller), caller.name)
        return json_response({"object": "list", "data": records})

    async def _decision(self, http: AiohttpRequest) -> ServerResponse:
        caller = self.reader.caller(http)
        decision_id = http.path.removeprefix("/v1/decisions/")
        record = await self.decisions.get(decision_id, client=caller.reads_decisions_of)
        if record is None:
            raise NotFound(f"Decision {decision_id[:100]!r} not found. Old decision records are deleted.")
        return json_response(record)

    # --- health ------------------------------------------------------------------------------------------------------

    async def _health(self, http: HttpExchange) -> ServerResponse:
        """Report that the daemon is alive, if routing works; `/readyz` reports whether a target can answer."""
        self.service.self_check()
        return json_response({"status": "ok", "uptime_s": self.readiness().uptime_s})

    async def _ready(self, http: HttpExchange) -> ServerResponse:
        readiness = self.readiness()
        return json_response(readiness, status=200 if readiness.ready else 503)

    async def _prometheus(self, http: HttpExchange) -> ServerResponse:
        await asyncio.to_thread(import_module, "prometheus_client")  # requests go on while the first scrape imports it
        self.decisions.settle()  # which counts their requests
        return body_response(self.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def _openapi(self, http: AiohttpRequest) -> ServerResponse:
        if not self._document:
            self._document = await asyncio.to_thread(lambda: _encoder.encode(self.describe()))
        return body_response(self._document)


def _query(filters: Mapping[str, str], caller: Caller) -> DecisionQuery:
    """Return the query of a request. Raises InvalidRequest, also for an unknown filter, and PermissionDenied."""
    for name in filters:
        if name not in DecisionQuery.__struct_fields__:
            known = ", ".join(DecisionQuery.__struct_fields__)
            raise InvalidRequest(f"Unknown filter {name[:64]!r}. Use one of: {known}.", param=name[:64])
    # "" matches everything; the first of several values counts
    set_filters = {name: filters[name] for name in filters if filters[name]}
    route, status = (
        read_choice(set_filters, "route", get_args(Route)),
        read_choice(set_filters, "status", get_args(Status)),
    )
    client = filters.get("client", "") or caller.reads_decisions_of
    if caller.reads_decisions_of not in ("", client):
        raise PermissionDenied(
            f"The API key of {caller.name!r} reads only its own decision records. To read the records of "
            f"{client[:64]!r}, add `rights: [decisions]` to this key in server.keys."
        )
    return DecisionQuery(
        client=client,
        route=route or "",
        target=filters.get("target", ""),
        status=status or "",
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
        bounds = f"from {least:g} to {most:g}" if most < float("inf") else f"of at least {least:g}"
        raise InvalidRequest(f"`{name}` must be a number {bounds}, not {text[:32]!r}.", param=name)
    return value
