"""The body of a job's answer, as the endpoint that its request names answers it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from ..openai import AnswerEncoder, ResponseEncoder, coalesce, encode_embeddings, parse_response
from ..types import Chunk, Embeddings, Request, RoutingHints
from .submission import Endpoint

_PREFIXES: Final[Mapping[Endpoint, str]] = {
    "/v1/chat/completions": "chatcmpl-",
    "/v1/completions": "cmpl-",
    "/v1/responses": "resp_",
    "/v1/embeddings": "emb-",
}


def answer_id(endpoint: Endpoint, job: str) -> str:
    """Return the id of a job's answer."""
    return _PREFIXES[endpoint] + job


def answer_encoder(
    endpoint: Endpoint, body: bytes, request: Request, job: str, model: str, created: int
) -> AnswerEncoder | ResponseEncoder:
    """Return the encoder of an answer in text.

    Args:
        endpoint: The job's.
        body: As it was accepted: a response repeats fields of it.
        request: As it ran.
        job: The job's id, for the answer's.
        model: The model that answered.
        created: Unix time in seconds.
    """
    name = answer_id(endpoint, job)
    if endpoint != "/v1/responses":
        return AnswerEncoder(request, name, model, created)
    _, echo = parse_response(body, RoutingHints())
    return ResponseEncoder(request, echo, name, model, created)


def encode_job_answer(
    endpoint: Endpoint,
    body: bytes,
    request: Request,
    job: str,
    model: str,
    created: int,
    answer: Sequence[Chunk] | Embeddings,
) -> bytes:
    """Encode a whole answer. The arguments are those of `answer_encoder`. Raises CausewayError."""
    if isinstance(answer, Embeddings):
        return encode_embeddings(request, answer, model)
    return answer_encoder(endpoint, body, request, job, model, created).whole(*coalesce(answer))
