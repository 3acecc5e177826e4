"""Traces of what the gateway does, to an OpenTelemetry collector: a span a request, and one for each call to a Triton,
on which Triton hangs its own. They hang on the caller's, so that one trace leads from the device into the model.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from router.telemetry import PROVIDER, Attributes, asked, failed, span_name, used
from router.types import Request, Usage

from .config import TracingConfig

_SERVICE = "causeway-gateway"
_FLUSH_S = 2.0
_OK = "ok"
_PROPAGATOR = TraceContextTextMapPropagator()
_TOLD = "x-causeway-"


class Tracing:
    """To `config.endpoint`, with what the OTEL_EXPORTER_OTLP_* variables say (headers, certificates)."""

    def __init__(self, config: TracingConfig) -> None:
        self._provider = TracerProvider(
            sampler=ParentBasedTraceIdRatio(config.share),
            resource=Resource.create({"service.name": _SERVICE}),
            shutdown_on_exit=False,
        )
        self._exporter = OTLPSpanExporter(endpoint=f"{config.endpoint.rstrip('/')}/v1/traces")
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("causeway.cloud")

    def begin(self, request: Request, id: str, traceparent: str) -> Trace:  # noqa: A002 -- of the request
        parent = _PROPAGATOR.extract({"traceparent": traceparent}) if traceparent else Context()
        carried = {"causeway.request": id, **asked(request)}
        name = span_name(request.kind, request.model)
        return Trace(self._tracer, self._tracer.start_span(name, parent, SpanKind.SERVER, carried))

    def close(self) -> None:
        # The provider waits for its exporter, which goes on trying for as long as it is not told to stop.
        enough = threading.Timer(_FLUSH_S, self._exporter.shutdown)
        enough.start()
        self._provider.shutdown()
        enough.cancel()


class Trace:
    """One request's span."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span

    def call(self, model: str, endpoint: str) -> CallTrace:
        host, _, port = endpoint.rpartition(":")
        carried: Attributes = {
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": model,
            "server.address": host,
            "server.port": int(port) if port.isdigit() else 0,
        }
        within = trace.set_span_in_context(self._span)
        return CallTrace(self._tracer.start_span(f"triton {model}", within, SpanKind.CLIENT, carried))

    def admitted(self) -> None:
        self._span.add_event("admitted")

    def end(self, *, tier: str, outcome: str, usage: Usage, headers: Mapping[str, str]) -> None:
        told = {name.replace(_TOLD, "causeway."): value for name, value in headers.items() if name.startswith(_TOLD)}
        error = "" if outcome == _OK else outcome
        self._span.set_attributes({"gen_ai.response.model": tier, **told, **used(usage), **failed(error)})
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


class CallTrace:
    """The span of a call to one endpoint."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    @property
    def traceparent(self) -> str:
        own = self._span.get_span_context()
        return f"00-{own.trace_id:032x}-{own.span_id:016x}-{own.trace_flags:02x}"

    def first_token(self) -> None:
        self._span.add_event("first token")

    def end(self, error: str = "") -> None:
        if not self._span.is_recording():
            return
        if error:
            self._span.set_attributes(failed(error))
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()
