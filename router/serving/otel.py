"""Traces to an OpenTelemetry collector: names and attributes of spans, their export, and a check of the collector.
Spans have names and numbers, never content, by the conventions for generative AI and our own under `causeway.`.
Sources: OpenTelemetry semantic conventions, "Semantic conventions for generative client AI spans",
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/, and, for jobs, "Semantic conventions for messaging
spans", https://opentelemetry.io/docs/specs/semconv/messaging/messaging-spans/.

Importing this module loads OpenTelemetry (0.1 s and several megabytes): import it lazily, or for type checking only.
"""

from __future__ import annotations

import os
import ssl
import threading
from collections.abc import Mapping
from typing import Literal

import aiohttp
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.re import parse_env_headers

from ..config import TracingConfig
from ..types import OPERATIONS, AttemptRecord, Kind, Outcome, Request, Usage

Value = str | bool | int | float | tuple[str, ...]
Attributes = dict[str, Value]

PROVIDER = "causeway"


def span_name(kind: Kind, model: str) -> str:
    """Return the name of a span, such as `chat assistant-large`."""
    return f"{OPERATIONS[kind]} {model}"


def request_attributes(request: Request) -> Attributes:
    """Return the attributes of a request. Parameters that the client does not set are left out."""
    sampling = request.sampling
    parameters: Mapping[str, Value | None] = {
        "max_tokens": request.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "seed": sampling.seed,
        "choice.count": request.n if request.n != 1 else None,
    }
    attributes: Attributes = {
        f"gen_ai.request.{name}": value for name, value in parameters.items() if value is not None
    }
    attributes["gen_ai.operation.name"] = OPERATIONS[request.kind]
    attributes["gen_ai.provider.name"] = PROVIDER
    attributes["gen_ai.request.model"] = request.model
    attributes["causeway.stream"] = request.stream
    if request.response_format is not None:
        attributes["gen_ai.output.type"] = "text" if request.response_format.kind == "text" else "json"
    return attributes


def messaging_attributes(
    operation: Literal["send", "receive", "process"], destination: str, message: str
) -> Attributes:
    """Return the attributes of a job in the queue of a tier. The span's name is ``<operation> <destination>``."""
    return {
        "messaging.system": PROVIDER,
        "messaging.destination.name": destination,
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
        "messaging.message.id": message,
    }


def usage_attributes(usage: Usage) -> Attributes:
    return {"gen_ai.usage.input_tokens": usage.prompt_tokens, "gen_ai.usage.output_tokens": usage.completion_tokens}


def error_attributes(code: str) -> Attributes:
    """Return the attributes of an error by its `code` (router.errors); {} for ""."""
    return {"error.type": code} if code else {}


def outcome_attributes(outcome: Outcome) -> Attributes:
    """Return the attributes of the outcome of a request at the edge."""
    attributes: Attributes = {
        "causeway.route": outcome.route,
        "causeway.reason": outcome.reason,
        "causeway.cache": outcome.cache,
        "causeway.degraded": outcome.degraded,
        "http.response.status_code": outcome.http_status,
        **usage_attributes(outcome.usage),
        **error_attributes(outcome.error),
    }
    if outcome.model:
        attributes["gen_ai.response.model"] = outcome.model
        attributes["causeway.target"] = outcome.target
    if outcome.finish_reason:
        attributes["gen_ai.response.finish_reasons"] = (outcome.finish_reason,)
    if outcome.ttft_ms is not None:
        attributes["causeway.time_to_first_token_s"] = outcome.ttft_ms / 1000.0
    return attributes


def attempt_attributes(attempt: AttemptRecord) -> Attributes:
    """Return the attributes of an attempt."""
    attributes: Attributes = {
        "gen_ai.provider.name": PROVIDER,
        "causeway.target": attempt.target,
        "causeway.route": attempt.at,
        "causeway.state": attempt.state,
        "gen_ai.usage.output_tokens": attempt.tokens,
        **error_attributes(attempt.error),
    }
    if attempt.confidence is not None:
        attributes["causeway.confidence"] = attempt.confidence.score
    return attributes


def export_fault(status: int, location: str = "") -> str:
    """Return why a collector did not accept an empty export of traces, and what to do; "" if its `status` says that it
    did. `location`: target of a redirect.
    """
    if 200 <= status < 300:
        return ""
    if 300 <= status < 400:
        return (
            f"it redirects (HTTP {status}) to {location or 'nowhere'}: the exporter may follow with a GET, lose every "
            "span, and report success. Set tracing.endpoint to the address behind the redirect."
        )
    if status in (401, 403):
        return f"it refuses the login (HTTP {status}). Set OTEL_EXPORTER_OTLP_HEADERS."
    return f"it answers HTTP {status}. Set tracing.endpoint to an OTLP collector over HTTP, without /v1/traces."


_ANSWER_S = 5.0
_FLUSH_S = 2.0
_PROPAGATOR = TraceContextTextMapPropagator()


class SpanExport:
    """An exporter to `config.endpoint`, with the headers and certificates of ``OTEL_EXPORTER_OTLP_*``. `ids`: the
    generator of span ids; None: random ids.
    """

    def __init__(self, config: TracingConfig, service: str, scope: str, ids: IdGenerator | None = None) -> None:
        self._provider = TracerProvider(
            sampler=ParentBasedTraceIdRatio(config.sample_ratio),
            resource=Resource.create({"service.name": service}),
            id_generator=ids,
            shutdown_on_exit=False,
        )
        self._exporter = OTLPSpanExporter(endpoint=f"{config.endpoint.rstrip('/')}/v1/traces")
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self.tracer: trace.Tracer = self._provider.get_tracer(scope)

    def flush(self) -> None:
        """Export every span that has ended. Blocks until the collector has them."""
        self._provider.force_flush()

    def close(self) -> None:
        """Export the remaining spans. Blocks, for a few seconds at most when the collector is unreachable."""
        # The provider waits for its exporter, and the exporter retries until it is shut down.
        timer = threading.Timer(_FLUSH_S, self._exporter.shutdown)
        timer.start()
        self._provider.shutdown()
        timer.cancel()


def context_of(traceparent: str) -> Context:
    """Return the parent context of a `traceparent` header; "" for no parent."""
    return _PROPAGATOR.extract({"traceparent": traceparent}) if traceparent else Context()


def traceparent_of(trace_id: int, span_id: int, flags: int) -> str:
    """Return the `traceparent` header with a span as the parent."""
    return f"00-{trace_id:032x}-{span_id:016x}-{flags:02x}"


async def send_empty_export(endpoint: str) -> str:
    """Send an export without spans. Returns why the collector did not accept it, and what to do; "" if it did. Headers
    and certificates come from the same variables as for `SpanExport`.
    """
    headers = {"content-type": "application/x-protobuf"}
    headers |= parse_env_headers(_variable("HEADERS"), liberal=True)
    try:
        tls = ssl.create_default_context(cafile=_variable("CERTIFICATE") or None)
        if own := _variable("CLIENT_CERTIFICATE"):
            tls.load_cert_chain(own, _variable("CLIENT_KEY") or None)
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
        async with (
            aiohttp.ClientSession(timeout=timeout, trust_env=True) as session,
            session.post(
                f"{endpoint.rstrip('/')}/v1/traces", data=b"", headers=headers, allow_redirects=False, ssl=tls
            ) as answer,
        ):
            return export_fault(answer.status, answer.headers.get("location", ""))
    except TimeoutError:
        return f"it does not answer within {_ANSWER_S:g} s."
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return f"it cannot be reached: {error}."


def _variable(name: str) -> str:
    return os.environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or os.environ.get(f"OTEL_EXPORTER_OTLP_{name}", "")
