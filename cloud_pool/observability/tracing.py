"""Traces of gateways and workers, sent to an OpenTelemetry collector.

A span for each request, one for each call to a Triton (the parent of Triton's own spans) and one for each operation in
the shared cache. A request's span is a child of the client's, so one trace leads from the device into the model.

A job's `send` (accepted by a gateway), `receive` (claimed), `process` (each of its runs) and the delivery of its
webhook are in the trace of the client that sent it. The last three are children of `send` and linked to it, as the
messaging conventions require; other processes may create them days later. Only a process with a collector imports this:
OpenTelemetry costs a tenth of a second and some megabytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from opentelemetry import trace
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import Link, SpanKind, Status, StatusCode

from causeway_server.router.config import TracingConfig
from causeway_server.router.residency import permits, regions_of
from causeway_server.router.serving.otel import (
    PROVIDER,
    Attributes,
    SpanExport,
    context_of,
    error_attributes,
    messaging_attributes,
    request_attributes,
    span_name,
    traceparent_of,
    usage_attributes,
)
from causeway_server.router.types import Request, Usage

CacheOperation = Literal["lookup", "follow", "keep"]
_OK = "ok"
_HEADER_PREFIX = "x-causeway-"


class Tracing(SpanExport):
    """The spans of one service."""

    def __init__(self, config: TracingConfig, service: str) -> None:
        super().__init__(config, service, "causeway.cloud")
        self._region = config.region
        self.jobs = JobTrace(self.tracer, config.region)

    def begin(self, request: Request, id: str, traceparent: str) -> Trace | None:  # noqa: A002 -- of the request
        """Begin a request's trace; None if it is bound to other regions. `traceparent`: the client's, "" for none."""
        if not permits(regions_of(request.hints.tags), self._region):
            return None
        parent = context_of(traceparent)
        attributes = {"causeway.request": id, **request_attributes(request)}
        name = span_name(request.kind, request.model)
        return Trace(self.tracer, self.tracer.start_span(name, parent, SpanKind.SERVER, attributes))


class JobTrace:
    """Spans in the life of jobs. `traceparent` is that of the job's `send` span unless stated otherwise."""

    def __init__(self, tracer: trace.Tracer, region: str = "") -> None:
        self._tracer = tracer
        self.region = region

    def untraced(self, traceparent: str) -> str:
        """Return the client's trace context as one that is not sampled, so that no later span of the job is sent."""
        sent, made = trace.get_current_span(context_of(traceparent)).get_span_context(), RandomIdGenerator()
        return traceparent_of(sent.trace_id or made.generate_trace_id(), sent.span_id or made.generate_span_id(), 0)

    def send(self, job: str, queue: str, traceparent: str) -> Span:
        """Start the span of accepting a job. `traceparent`: the client's, "" for none."""
        attributes = messaging_attributes("send", queue, job)
        return Span(self._tracer.start_span(f"send {queue}", context_of(traceparent), SpanKind.PRODUCER, attributes))

    def received(self, job: str, queue: str, traceparent: str, began: float) -> None:
        """Record that a worker claimed the job. `began`: Unix time in seconds at which the claim started."""
        attributes = messaging_attributes("receive", queue, job)
        self._follow(f"receive {queue}", traceparent, SpanKind.CLIENT, attributes, int(began * 1e9)).end()

    def process(self, request: Request, job: str, queue: str, traceparent: str, attempt: int) -> Trace | None:
        """Start the trace of run number `attempt`; None if the job is bound to other regions."""
        if not permits(regions_of(request.hints.tags), self.region):
            return None
        attributes = {
            "causeway.request": job,
            "causeway.attempt": attempt,
            **request_attributes(request),
            **messaging_attributes("process", queue, job),
        }
        return Trace(self._tracer, self._follow(f"process {queue}", traceparent, SpanKind.CONSUMER, attributes))

    def deliver(self, job: str, host: str, traceparent: str, tried: int) -> Span:
        """Start the span of delivering the job's webhook after `tried` attempts."""
        attributes: Attributes = {
            "messaging.message.id": job,
            "http.request.method": "POST",
            "http.request.resend_count": tried,
            "server.address": host,
        }
        return Span(self._follow("POST webhook", traceparent, SpanKind.CLIENT, attributes))

    def _follow(
        self, name: str, traceparent: str, kind: SpanKind, attributes: Attributes, start_ns: int | None = None
    ) -> trace.Span:
        """Start a child of the span that sent the job, and link it to that span if it was traced."""
        sent = context_of(traceparent)
        sender = trace.get_current_span(sent).get_span_context()
        links = (Link(sender),) if sender.is_valid else ()
        return self._tracer.start_span(name, sent, kind, attributes, links, start_ns)


class Trace:
    """The span of one request, or of one run of a job."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span

    def call(self, model: str, endpoint: str) -> CallTrace:
        host, _, port = endpoint.rpartition(":")
        attributes: Attributes = {
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": model,
            "server.address": host,
            "server.port": int(port) if port.isdigit() else 0,
        }
        parent = trace.set_span_in_context(self._span)
        return CallTrace(self._tracer.start_span(f"triton {model}", parent, SpanKind.CLIENT, attributes))

    def cache(self, operation: CacheOperation) -> Span:
        """Start the span of an operation in the shared cache."""
        attributes: Attributes = {"db.system.name": "redis", "db.operation.name": operation}
        parent = trace.set_span_in_context(self._span)
        return Span(self._tracer.start_span(f"cache {operation}", parent, SpanKind.CLIENT, attributes))

    def add_link(self, other: Trace) -> None:
        """Add a link to the request whose generation answers this one, too."""
        self._span.add_link(other._span.get_span_context())

    def admitted(self) -> None:
        """Record that the request has its permit, after waiting for it."""
        self._span.add_event("admitted")

    def end(self, *, tier: str, outcome: str, usage: Usage, headers: Mapping[str, str]) -> None:
        """End the trace. `outcome`: "ok" or an error's code; `headers`: the answer's response headers."""
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


class Span:
    """The span of one operation for a request or a job."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    @property
    def traceparent(self) -> str:
        """Return the parent for spans that other processes create, such as Triton or a worker."""
        context = self._span.get_span_context()
        return traceparent_of(context.trace_id, context.span_id, context.trace_flags)

    def end(self, error: str = "", attributes: Mapping[str, str | int] | None = None, *, outcome: str = "") -> None:
        """End the span once; later calls are ignored. `error`: code of `router.errors`; `outcome`: kind of success."""
        if not self._span.is_recording():
            return
        self._span.set_attributes({**(attributes or {}), **({"causeway.outcome": outcome} if outcome else {})})
        if error:
            self._span.set_attributes(error_attributes(error))
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


class CallTrace(Span):
    """The span of a call to one endpoint."""

    def first_token(self) -> None:
        self._span.add_event("first token")
