"""What a trace's spans are called and what they carry: the conventions for generative AI, and ours under `causeway.`

Names and numbers only, never content. Source: OpenTelemetry semantic conventions, "Semantic conventions for generative
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
    """`chat assistant-large`."""
    return f"{_OPERATIONS[kind]} {model}"


def asked(request: Request) -> Attributes:
    """What was asked for; what the caller left open is absent."""
    sampling = request.sampling
    said: Mapping[str, Value | None] = {
        "max_tokens": request.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "seed": sampling.seed,
        "choice.count": request.n if request.n != 1 else None,
    }
    found: Attributes = {f"gen_ai.request.{name}": value for name, value in said.items() if value is not None}
    found["gen_ai.operation.name"] = _OPERATIONS[request.kind]
    found["gen_ai.provider.name"] = PROVIDER
    found["gen_ai.request.model"] = request.model
    found["causeway.stream"] = request.stream
    if request.response_format is not None:
        found["gen_ai.output.type"] = "text" if request.response_format.kind == "text" else "json"
    return found


def messaging_attributes(
    operation: Literal["send", "receive", "process"], destination: str, message: str
) -> Attributes:
    """Of a job on its way through the queue of a tier. The span is called ``<operation> <destination>``."""
    return {
        "messaging.system": PROVIDER,
        "messaging.destination.name": destination,
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
        "messaging.message.id": message,
    }


def used(usage: Usage) -> Attributes:
    return {"gen_ai.usage.input_tokens": usage.prompt_tokens, "gen_ai.usage.output_tokens": usage.completion_tokens}


def failed(code: str) -> Attributes:
    """`code` of router.errors; none for ""."""
    return {"error.type": code} if code else {}


def outcome_attributes(outcome: Outcome) -> Attributes:
    """What the edge made of a request."""
    found: Attributes = {
        "causeway.route": outcome.route,
        "causeway.reason": outcome.reason,
        "causeway.cache": outcome.cache,
        "causeway.degraded": outcome.degraded,
        "http.response.status_code": outcome.http_status,
        **used(outcome.usage),
        **failed(outcome.error),
    }
    if outcome.model:
        found["gen_ai.response.model"] = outcome.model
        found["causeway.target"] = outcome.target
    if outcome.finish_reason:
        found["gen_ai.response.finish_reasons"] = (outcome.finish_reason,)
    if outcome.ttft_ms is not None:
        found["causeway.time_to_first_token_s"] = outcome.ttft_ms / 1000.0
    return found


def tried(attempt: AttemptRecord) -> Attributes:
    """What became of one attempt."""
    found: Attributes = {
        "gen_ai.provider.name": PROVIDER,
        "causeway.target": attempt.target,
        "causeway.route": attempt.at,
        "causeway.state": attempt.state,
        "gen_ai.usage.output_tokens": attempt.tokens,
        **failed(attempt.error),
    }
    if attempt.confidence is not None:
        found["causeway.confidence"] = attempt.confidence.score
    return found
