"""A collector: takes OTLP over HTTP, as protobuf, and keeps the spans."""

from __future__ import annotations

import asyncio
import gzip

import msgspec
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Wire


class Span(msgspec.Struct, frozen=True):
    """Ids in hex; times in Unix s."""

    service: str
    name: str
    kind: int
    trace: str
    id: str
    parent: str
    begin: float
    end: float
    attributes: dict[str, object]
    error: str
    events: tuple[str, ...]
    links: tuple[str, ...]


class Collector:
    def __init__(self) -> None:
        self.url = ""
        self.spans: list[Span] = []
        self._changed = asyncio.Event()
        self._runner: web.AppRunner | None = None

    async def start(self) -> Collector:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_post("/v1/traces", self._take)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def until(self, count: int) -> list[Span]:
        """As soon as there are so many."""
        while len(self.spans) < count:
            self._changed.clear()
            await self._changed.wait()
        return self.spans

    async def _take(self, http: web.Request) -> web.Response:
        body = await http.read()
        if http.headers.get("content-encoding") == "gzip" and body[:2] == b"\x1f\x8b":
            body = gzip.decompress(body)
        said = ExportTraceServiceRequest.FromString(body)
        for of_resource in said.resource_spans:
            resource = {pair.key: _value(pair.value) for pair in of_resource.resource.attributes}
            for scope in of_resource.scope_spans:
                self.spans += [_span(str(resource.get("service.name", "")), wire) for wire in scope.spans]
        self._changed.set()
        return web.Response(body=ExportTraceServiceResponse().SerializeToString())


def _span(service: str, wire: Wire) -> Span:
    return Span(
        service=service,
        name=wire.name,
        kind=wire.kind,
        trace=wire.trace_id.hex(),
        id=wire.span_id.hex(),
        parent=wire.parent_span_id.hex(),
        begin=wire.start_time_unix_nano / 1e9,
        end=wire.end_time_unix_nano / 1e9,
        attributes={pair.key: _value(pair.value) for pair in wire.attributes},
        error=wire.status.message if wire.status.code == 2 else "",
        events=tuple(event.name for event in wire.events),
        links=tuple(link.span_id.hex() for link in wire.links),
    )


def _value(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return None if kind is None else getattr(value, kind)
