"""Names and attributes of trace spans: the conventions for generative AI, and our own under `causeway.`

Names and numbers only, never content. Sources: OpenTelemetry semantic conventions, "Semantic conventions for generative
client AI spans", https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/, and, for jobs, "Semantic conventions
for messaging spans", https://opentelemetry.io/docs/specs/semconv/messaging/messaging-spans/.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from .types import AttemptRecord, Kind, Outcome, Request, Usage

Value = str | bool | int | float | tuple[str, ...]
Attributes = dict[str, Value]

PROVIDER = "causeway"
_OPERATIONS: Mapping[Kind, str] = {"chat": "chat", "completion": "text_completion", "embedding": "embeddings"}


def span_name(kind: Kind, model: str) -> str:
    """Return the name of a span, such as `chat assistant-large`."""
    return f"{_OPERATIONS[kind]} {model}"


def request_attributes(request: Request) -> Attributes:
    """Describe the request. Parameters that the client does not set are left out."""
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
    attributes["gen_ai.operation.name"] = _OPERATIONS[request.kind]
    attributes["gen_ai.provider.name"] = PROVIDER
    attributes["gen_ai.request.model"] = request.model
    attributes["causeway.stream"] = request.stream
    if request.response_format is not None:
        attributes["gen_ai.output.type"] = "text" if request.response_format.kind == "text" else "json"
    return attributes


def messaging_attributes(
    operation: Literal["send", "receive", "process"], destination: str, message: str
) -> Attributes:
    """Describe a job in the queue of a tier. The span's name is ``<operation> <destination>``."""
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
    """Describe an error by its `code` (router.errors); empty for ""."""
    return {"error.type": code} if code else {}


def outcome_attributes(outcome: Outcome) -> Attributes:
    """Describe the outcome of a request at the edge."""
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
    """Describe one attempt."""
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
    """Return why a collector did not take an empty export of traces, and what to do; "" if it did.

    Args:
        status: HTTP status of its answer.
        location: where a redirect leads.
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
