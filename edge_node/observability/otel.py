"""Traces of what the daemon does, to an OpenTelemetry collector: a span a request, and one for each of its attempts.

The spans are made once a request is over, from its decision record, so that nothing waits for them; only their ids
exist before, for the cloud to hang its own spans on. A request that is bound to the device leaves none.
"""

from __future__ import annotations

import random
import threading

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from router.telemetry import asked, outcome_attributes, span_name, tried
from router.types import AttemptRecord, DecisionRecord, Request

from ..config.schema import TracingConfig
from . import tracing

_SERVICE = "causeway-edge"
_FLUSH_S = 2.0
_PROPAGATOR = TraceContextTextMapPropagator()


class SpanIds(RandomIdGenerator):
    """Random, but for a span whose id was told to others before it is made."""

    def __init__(self) -> None:
        self.told: int | None = None

    def generate_span_id(self) -> int:
        told, self.told = self.told, None
        return super().generate_span_id() if told is None else told


class OtelTracer:
    """`exporter` None: to `config.endpoint`, over HTTP, with what the OTEL_EXPORTER_OTLP_* variables say (headers,
    certificates)."""

    def __init__(self, config: TracingConfig, exporter: SpanExporter | None = None) -> None:
        self._ids = SpanIds()
        self._provider = TracerProvider(
            sampler=ParentBasedTraceIdRatio(config.share),
            resource=Resource.create({"service.name": _SERVICE}),
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        self._exporter = exporter or OTLPSpanExporter(endpoint=f"{config.endpoint.rstrip('/')}/v1/traces")
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("causeway.edge")

    def begin(self, request: Request, traceparent: str, now: float) -> OtelTrace:
        """`now`: Unix s, when it arrived. `traceparent`: the caller's, "" for none."""
        parent = _PROPAGATOR.extract({"traceparent": traceparent}) if traceparent else Context()
        span = self._tracer.start_span(
            span_name(request.kind, request.model), parent, SpanKind.SERVER, asked(request), start_time=_ns(now)
        )
        return OtelTrace(self._tracer, self._ids, span)

    def close(self) -> None:
        """Blocks until what is left is sent, a few seconds at most where nobody takes it."""
        # The provider waits for its exporter, which goes on trying for as long as it is not told to stop.
        enough = threading.Timer(_FLUSH_S, self._exporter.shutdown)
        enough.start()
        self._provider.shutdown()
        enough.cancel()


class OtelTrace:
    """One request's."""

    def __init__(self, tracer: trace.Tracer, ids: SpanIds, span: trace.Span) -> None:
        self._tracer = tracer
        self._ids = ids
        self._span = span
        self._attempts: list[int] = []  # their spans' ids

    @property
    def context(self) -> SpanContext:
        return self._span.get_span_context()

    def attempt(self, number: int) -> str:
        """The `traceparent` that attempt `number` (0 is the first) hands on."""
        own = self.context
        if not own.trace_flags.sampled:
            return _traceparent(own.trace_id, own.span_id, sampled=False)
        while len(self._attempts) <= number:
            self._attempts.append(random.getrandbits(64) or 1)
        return _traceparent(own.trace_id, self._attempts[number], sampled=True)

    def end(self, record: DecisionRecord, *, shared: tracing.RequestTrace | None = None) -> None:
        """`shared`: the trace of the request whose work answered this one, too."""
        if not self._span.is_recording():
            return
        outcome, began = record.outcome, record.created - record.outcome.total_ms / 1000.0
        self._span.set_attributes({"causeway.decision": record.id, **outcome_attributes(outcome)})
        if outcome.status == "error":
            self._span.set_status(Status(StatusCode.ERROR, outcome.error))
        if isinstance(shared, OtelTrace):
            self._span.add_link(shared.context)
        else:
            for number, attempt in enumerate(outcome.attempts):
                self._tried(number, attempt, began)
        self._span.end(_ns(record.created))

    def _tried(self, number: int, attempt: AttemptRecord, began: float) -> None:
        within = trace.set_span_in_context(self._span)
        kind = SpanKind.CLIENT if attempt.at == "cloud" else SpanKind.INTERNAL
        at = began + attempt.started_ms / 1000.0
        self._ids.told = self._attempts[number] if number < len(self._attempts) else None
        span = self._tracer.start_span(f"attempt {attempt.target}", within, kind, tried(attempt), start_time=_ns(at))
        if attempt.ttft_ms is not None:
            span.add_event("first token", timestamp=_ns(at + attempt.ttft_ms / 1000.0))
        if attempt.error:
            span.set_status(Status(StatusCode.ERROR, attempt.error))
        span.end(_ns(at + (attempt.duration_ms or 0.0) / 1000.0))


def _traceparent(trace_id: int, span_id: int, *, sampled: bool) -> str:
    return f"00-{trace_id:032x}-{span_id:016x}-{'01' if sampled else '00'}"


def _ns(unix_s: float) -> int:
    return int(unix_s * 1e9)
