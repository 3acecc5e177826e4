"""A collector: accepts OTLP over HTTP as protobuf or JSON, and keeps the spans."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import ssl
from collections.abc import Collection

import msgspec
from aiohttp import web
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Wire


class Span(msgspec.Struct, frozen=True):
    """Ids in hex, times in Unix seconds."""

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

    async def start(self, tls: ssl.SSLContext | None = None) -> Collector:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_post("/v1/traces", self._receive)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=tls).start()
        self.url = f"http{'s' * (tls is not None)}://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def until(self, names: Collection[str]) -> list[Span]:
        """Wait for and return the spans of the first trace that has each of these names."""
        while True:
            for trace in dict.fromkeys(span.trace for span in self.spans):
                found = [span for span in self.spans if span.trace == trace]
                if {span.name for span in found} >= set(names):
                    return found
            self._changed.clear()
            await self._changed.wait()

    async def _receive(self, http: web.Request) -> web.Response:
        body = await http.read()
        if http.headers.get("content-encoding") == "gzip" and body[:2] == b"\x1f\x8b":
            body = gzip.decompress(body)
        export = _read(body, http.content_type)
        for of_resource in export.resource_spans:
            resource = {pair.key: _value(pair.value) for pair in of_resource.resource.attributes}
            for scope in of_resource.scope_spans:
                self.spans += [_span(str(resource.get("service.name", "")), wire) for wire in scope.spans]
        self._changed.set()
        return web.Response(body=ExportTraceServiceResponse().SerializeToString())


def _read(body: bytes, content_type: str) -> ExportTraceServiceRequest:
    """OTLP as protobuf, or as JSON, where ids are in hex instead of base64 as elsewhere in protobuf's JSON."""
    if content_type != "application/json":
        return ExportTraceServiceRequest.FromString(body)
    export = json.loads(body)
    for of_resource in export["resourceSpans"]:
        for scope in of_resource["scopeSpans"]:
            for span in scope["spans"]:
                for key in ("traceId", "spanId", "parentSpanId"):
                    span[key] = base64.b64encode(bytes.fromhex(span.get(key, ""))).decode()
    return json_format.ParseDict(export, ExportTraceServiceRequest(), ignore_unknown_fields=True)


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
