"""Traces of gateways and workers, sent to an OpenTelemetry collector.

A span for each request, one for each call to a Triton (the parent of Triton's own spans) and one for each operation in
the shared cache. A request's span is a child of the client's, so one trace leads from the device into the model.

A job's `send` (accepted by a gateway), `receive` (claimed), `process` (each of its runs) and the delivery of its
webhook are in the trace of the client that sent it. The last three are children of `send` and linked to it, as the
messaging conventions ask; other processes may create them days later.
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
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from router.serving.config import TracingConfig
from router.telemetry import (
    PROVIDER,
    Attributes,
    error_attributes,
    messaging_attributes,
    request_attributes,
    span_name,
    usage_attributes,
)
from router.types import Request, Usage

from . import tracing

_FLUSH_S = 2.0
_OK = "ok"
_PROPAGATOR = TraceContextTextMapPropagator()
_HEADER_PREFIX = "x-causeway-"


class OtelTracing:
    """Exports to `config.endpoint`; headers and certificates come from the OTEL_EXPORTER_OTLP_* variables."""

    def __init__(self, config: TracingConfig, service: str) -> None:
        self._provider = TracerProvider(
            sampler=ParentBasedTraceIdRatio(config.sample_ratio),
            resource=Resource.create({"service.name": service}),
            shutdown_on_exit=False,
        )
        self._exporter = OTLPSpanExporter(endpoint=f"{config.endpoint.rstrip('/')}/v1/traces")
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("causeway.cloud")
        self.jobs = OtelJobTrace(self._tracer)

    def begin(self, request: Request, id: str, traceparent: str) -> OtelTrace:  # noqa: A002 -- of the request
        parent = _context(traceparent)
        attributes = {"causeway.request": id, **request_attributes(request)}
        name = span_name(request.kind, request.model)
        return OtelTrace(self._tracer, self._tracer.start_span(name, parent, SpanKind.SERVER, attributes))

    def flush(self) -> None:
        """Export every span that has ended. Blocks until the collector has them."""
        self._provider.force_flush()

    def close(self) -> None:
        # The provider waits for its exporter, which retries until it is shut down.
        timer = threading.Timer(_FLUSH_S, self._exporter.shutdown)
        timer.start()
        self._provider.shutdown()
        timer.cancel()


class OtelJobTrace:
    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer

    def send(self, job: str, queue: str, traceparent: str) -> OtelSpan:
        attributes = messaging_attributes("send", queue, job)
        return OtelSpan(self._tracer.start_span(f"send {queue}", _context(traceparent), SpanKind.PRODUCER, attributes))

    def received(self, job: str, queue: str, traceparent: str, began: float) -> None:
        sent, attributes = _context(traceparent), messaging_attributes("receive", queue, job)
        links = _links(sent)
        self._tracer.start_span(
            f"receive {queue}", sent, SpanKind.CLIENT, attributes, links, start_time=int(began * 1e9)
        ).end()

    def process(self, request: Request, job: str, queue: str, traceparent: str, attempt: int) -> OtelTrace:
        sent = _context(traceparent)
        attributes = {
            "causeway.request": job,
            "causeway.attempt": attempt,
            **request_attributes(request),
            **messaging_attributes("process", queue, job),
        }
        span = self._tracer.start_span(f"process {queue}", sent, SpanKind.CONSUMER, attributes, _links(sent))
        return OtelTrace(self._tracer, span)

    def deliver(self, job: str, host: str, traceparent: str, tried: int) -> OtelSpan:
        sent = _context(traceparent)
        attributes: Attributes = {
            "messaging.message.id": job,
            "http.request.method": "POST",
            "http.request.resend_count": tried,
            "server.address": host,
        }
        return OtelSpan(self._tracer.start_span("POST webhook", sent, SpanKind.CLIENT, attributes, _links(sent)))


class OtelTrace:
    """The span of one request, or of one run of a job."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span

    @property
    def context(self) -> SpanContext:
        return self._span.get_span_context()

    def call(self, model: str, endpoint: str) -> OtelCallTrace:
        host, _, port = endpoint.rpartition(":")
        attributes: Attributes = {
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": model,
            "server.address": host,
            "server.port": int(port) if port.isdigit() else 0,
        }
        parent = trace.set_span_in_context(self._span)
        return OtelCallTrace(self._tracer.start_span(f"triton {model}", parent, SpanKind.CLIENT, attributes))

    def cache(self, operation: tracing.CacheOperation) -> OtelSpan:
        attributes: Attributes = {"db.system.name": "redis", "db.operation.name": operation}
        parent = trace.set_span_in_context(self._span)
        return OtelSpan(self._tracer.start_span(f"cache {operation}", parent, SpanKind.CLIENT, attributes))

    def add_link(self, other: tracing.Trace) -> None:
        if isinstance(other, OtelTrace):
            self._span.add_link(other.context)

    def admitted(self) -> None:
        self._span.add_event("admitted")

    def end(self, *, tier: str, outcome: str, usage: Usage, headers: Mapping[str, str]) -> None:
        described = {
            name.replace(_HEADER_PREFIX, "causeway."): value
            for name, value in headers.items()
            if name.startswith(_HEADER_PREFIX)
        }
        error = "" if outcome == _OK else outcome
        self._span.set_attributes(
            {"gen_ai.response.model": tier, **described, **usage_attributes(usage), **error_attributes(error)}
        )
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


class OtelSpan:
    """The span of one operation for a request or a job."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    @property
    def traceparent(self) -> str:
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def end(self, error: str = "", attributes: Mapping[str, str | int] | None = None) -> None:
        if not self._span.is_recording():
            return
        self._span.set_attributes(attributes or {})
        if error:
            self._span.set_attributes(error_attributes(error))
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


class OtelCallTrace(OtelSpan):
    """The span of a call to one endpoint."""

    def first_token(self) -> None:
        self._span.add_event("first token")


def _context(traceparent: str) -> Context:
    return _PROPAGATOR.extract({"traceparent": traceparent}) if traceparent else Context()


def _links(sent: Context) -> tuple[Link, ...]:
    """Link to the span that sent the job; none if it was not traced."""
    sender = trace.get_current_span(sent).get_span_context()
    return (Link(sender),) if sender.is_valid else ()
