"""Traces to an OpenTelemetry collector: one span per request and one per attempt.

Spans are created after the request has ended, from its decision record, so that no request waits for them. Only the
span ids exist earlier, because the cloud needs one as the parent of its own spans. A request that is bound to the
device, or to regions other than the collector's, produces no spans. Import this module, like `router.serving.otel`,
lazily or for type checking only.
"""

from __future__ import annotations

import random

from opentelemetry import trace
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode

from causeway_server.router.config import TracingConfig
from causeway_server.router.serving.otel import (
    SpanExport,
    attempt_attributes,
    context_of,
    outcome_attributes,
    request_attributes,
    span_name,
    traceparent_of,
)
from causeway_server.router.types import AttemptRecord, DecisionRecord, Request


class _SpanIds(RandomIdGenerator):
    """Generates random span ids, unless the next span's id was already sent to the cloud as a parent."""

    def __init__(self) -> None:
        self.reserved: int | None = None

    def generate_span_id(self) -> int:
        reserved, self.reserved = self.reserved, None
        return super().generate_span_id() if reserved is None else reserved


class RequestTracer(SpanExport):
    """Creates the spans of requests and exports them."""

    def __init__(self, config: TracingConfig) -> None:
        self._ids = _SpanIds()
        self._region = config.region
        super().__init__(config, "causeway-edge", "causeway.edge", self._ids)

    def begin(self, request: Request, traceparent: str, now: float) -> RequestTrace:
        """Start a request's trace. `traceparent`: the client's context; "": none; `now`: its arrival, Unix seconds."""
        span = self.tracer.start_span(
            span_name(request.kind, request.model),
            context_of(traceparent),
            SpanKind.SERVER,
            request_attributes(request),
            start_time=_ns(now),
        )
        return RequestTrace(self.tracer, self._ids, span, self._region)


class RequestTrace:
    """The spans of one request. `region`: that of the collector."""

    def __init__(self, tracer: trace.Tracer, ids: _SpanIds, span: trace.Span, region: str = "") -> None:
        self.region = region
        self._tracer = tracer
        self._ids = ids
        self._span = span
        self._attempt_span_ids: list[int] = []

    @property
    def context(self) -> SpanContext:
        return self._span.get_span_context()

    def attempt(self, number: int) -> str:
        """Return the `traceparent` header that attempt `number` (counted from 0) sends upstream."""
        context = self.context
        if not context.trace_flags.sampled:
            return traceparent_of(context.trace_id, context.span_id, 0)
        while len(self._attempt_span_ids) <= number:
            self._attempt_span_ids.append(random.getrandbits(64) or 1)
        return traceparent_of(context.trace_id, self._attempt_span_ids[number], 1)

    def end(self, record: DecisionRecord, *, shared: RequestTrace | None = None) -> None:
        """End the request's span, with a span per attempt. Those of `shared`, whose generation answered, are linked."""
        if not self._span.is_recording():
            return
        outcome, started_at = record.outcome, record.created - record.outcome.total_ms / 1000.0
        self._span.set_attributes({"causeway.decision": record.id, **outcome_attributes(outcome)})
        if outcome.status == "error":
            self._span.set_status(Status(StatusCode.ERROR, outcome.error))
        if shared is not None:
            self._span.add_link(shared.context)
        else:
            for number, attempt in enumerate(outcome.attempts):
                self._record_attempt(number, attempt, started_at)
        self._span.end(_ns(record.created))

    def _record_attempt(self, number: int, attempt: AttemptRecord, request_started_at: float) -> None:
        parent = trace.set_span_in_context(self._span)
        kind = SpanKind.CLIENT if attempt.at == "cloud" else SpanKind.INTERNAL
        started_at = request_started_at + attempt.started_ms / 1000.0
        self._ids.reserved = self._attempt_span_ids[number] if number < len(self._attempt_span_ids) else None
        span = self._tracer.start_span(
            f"attempt {attempt.target}", parent, kind, attempt_attributes(attempt), start_time=_ns(started_at)
        )
        if attempt.ttft_ms is not None:
            span.add_event("first token", timestamp=_ns(started_at + attempt.ttft_ms / 1000.0))
        if attempt.error:
            span.set_status(Status(StatusCode.ERROR, attempt.error))
        span.end(_ns(started_at + (attempt.duration_ms or 0.0) / 1000.0))


def _ns(unix_s: float) -> int:
    return int(unix_s * 1e9)
