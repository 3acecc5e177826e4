"""The body of a job and of its answer, for gateway and device. The body is an OpenAI request with additional fields of
ours, which are removed to leave a plain request. The answer has the format of the endpoint that the request names.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Final, Literal, get_args

import msgspec
from msgspec import Meta

from ..anthropic.encoder import MessageEncoder
from ..anthropic.request import parse_messages
from ..errors import InvalidRequest
from ..openai.answer import AnswerEncoder, CachedAnswer, coalesce
from ..openai.chat import parse_chat
from ..openai.completions import parse_completion
from ..openai.embeddings import encode_embeddings, parse_embedding
from ..openai.request_body import BOM, check_field_names, load, validate
from ..openai.responses.encoder import ResponseEncoder
from ..openai.responses.request import parse_response
from ..types import Chunk, Embeddings, Priority, Request, RoutingHints

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/messages"]
ENDPOINTS: Final[tuple[Endpoint, ...]] = get_args(Endpoint)
RANK: Final[dict[Priority, int]] = {"interactive": 0, "standard": 1, "bulk": 2}
_CANONICAL: Final = "json:"  # before digests of the canonical form
_KEY: Final = re.compile(r"[\x21-\x7e]{1,255}")
_ADVICE: Final = {
    "priority": "Use interactive, standard or bulk.",
    "endpoint": f"Use one of {', '.join(ENDPOINTS)}.",
    "webhook": "Send a URL.",
    "revise_within_ms": "Answers are no longer revised: leave it out.",
    "window": "There are no off-peak hours: leave it out, or send `not_before_ms`.",
    "not_before_ms": "Send the time to wait as a whole number of milliseconds, at least 0.",
}
_PREFIXES: Final[Mapping[Endpoint, str]] = {
    "/v1/chat/completions": "chatcmpl-",
    "/v1/completions": "cmpl-",
    "/v1/responses": "resp_",
    "/v1/embeddings": "emb-",
    "/v1/messages": "msg_",
}


class JobFields(msgspec.Struct, frozen=True):
    """Our fields in a job's body. `deadline_ms` is the time left, `not_before_ms` the minimum time to wait."""

    priority: Priority | None = None
    deadline_ms: Annotated[int, Meta(ge=1)] | None = None
    not_before_ms: Annotated[int, Meta(ge=0)] = 0
    webhook: str = ""
    endpoint: Endpoint = "/v1/chat/completions"
    revise_within_ms: None = None  # of an earlier version; refused
    window: None = None  # likewise


def split_body(body: bytes) -> tuple[JobFields, bytes]:
    """Return our fields, and the body without them. Raise InvalidRequest if the body is not a JSON object, repeats a
    key, or one of our fields is invalid or misspelt. The endpoint's parser reports other faults.
    """
    body = body.removeprefix(BOM)
    whole = load(body)
    names = JobFields.__struct_fields__
    known = frozenset((*names, "causeway"))
    check_field_names(whole.keys() - known, known)
    fields = {name: whole[name] for name in names if name in whole}
    if not fields:
        return JobFields(), body
    plain = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    for name in fields:
        del plain[name]
    return validate(fields, JobFields, _ADVICE), msgspec.json.encode(plain)


def parse_job_request(endpoint: Endpoint, body: bytes, hints: RoutingHints) -> Request:
    """Parse the request of a job. The tags of `hints` are added to those of the body. Raises InvalidRequest."""
    return _PARSERS[endpoint](body, hints)


_PARSERS: Final[Mapping[Endpoint, Callable[[bytes, RoutingHints], Request]]] = {
    "/v1/chat/completions": parse_chat,
    "/v1/completions": parse_completion,
    "/v1/responses": lambda body, hints: parse_response(body, hints)[0],
    "/v1/embeddings": parse_embedding,
    "/v1/messages": lambda body, hints: parse_messages(body, hints)[0],
}


def body_digest(headers: str, body: bytes) -> str:
    """Return the digest of everything that must be equal in requests with the same Idempotency-Key: the hints of the
    headers and the body, if it is JSON in canonical form, so that order of keys, spaces, escapes and a byte order mark
    do not matter.
    """
    with contextlib.suppress(ValueError, RecursionError):
        body = msgspec.json.encode(msgspec.json.decode(body.removeprefix(BOM)), order="sorted")
    return _CANONICAL + hashlib.sha256(headers.encode("utf-8", "replace") + b"\0" + body).hexdigest()


def is_same_request(known: str, digest: str) -> bool:
    """Return whether a request of this digest is the one known under its key. An earlier release's digest is of the
    body's bytes and cannot be compared, so the key alone decides.
    """
    return known == digest or (digest.startswith(_CANONICAL) and not known.startswith(_CANONICAL))


def key_digest(key: str) -> str:
    """Return the digest of an Idempotency-Key, stored in its place: a key may be secret. Raises InvalidRequest."""
    if not key:
        return ""
    if not _KEY.fullmatch(key):
        raise InvalidRequest("`Idempotency-Key` must be 1 to 255 visible ASCII characters.")
    return hashlib.sha256(key.encode()).hexdigest()


def encode_job_answer(
    endpoint: Endpoint,
    body: bytes,
    request: Request,
    job: str,
    model: str,
    created: int,
    elapsed_s: float,
    answer: Sequence[Chunk] | CachedAnswer | Embeddings,
    temperature: float | None = None,
) -> bytes:
    """Encode a whole answer. Raises CausewayError. A Response object repeats fields of the accepted `body`; the
    answer's id is made from the job's; the run began at `created` (Unix time), `elapsed_s` ago. `temperature`: the
    model's, if the request sets none; None: unknown.
    """
    if isinstance(answer, Embeddings):
        return encode_embeddings(request, answer, model)
    name = _PREFIXES[endpoint] + job
    encoder: AnswerEncoder | ResponseEncoder | MessageEncoder = AnswerEncoder(request, name, model, created)
    if endpoint == "/v1/responses":
        _, echo = parse_response(body, RoutingHints())
        encoder = ResponseEncoder(request, echo, echo.id or name, model, created, lambda: elapsed_s, temperature)
    elif endpoint == "/v1/messages":
        _, terms = parse_messages(body, RoutingHints())
        encoder = MessageEncoder(request, terms, name, model)
    if isinstance(answer, CachedAnswer):
        return encoder.whole(answer.choices, answer.usage)
    return encoder.whole(*coalesce(answer))


class FirstText:
    """Chooses the text of an answer that is shown while it is made: that of its only choice. A Response object has
    items, so of a response only the text of the first one is shown, if that is a message.
    """

    def __init__(self, endpoint: str, sequences: int) -> None:
        self._shown = sequences == 1
        self._has_items = endpoint == "/v1/responses"

    def of(self, chunk: Chunk) -> str:
        self._shown = self._shown and not (self._has_items and chunk.reasoning)
        text = chunk.text if self._shown else ""
        self._shown = self._shown and not (self._has_items and (chunk.tool_calls or chunk.refusal is not None))
        return text


class _AnswerMessage(msgspec.Struct):
    content: str | None = None


class _AnswerChoice(msgspec.Struct):
    message: _AnswerMessage | None = None
    text: str = ""


class _StoredAnswer(msgspec.Struct):
    choices: list[_AnswerChoice] = []


def answer_text(result: bytes) -> str:
    """Return the text of a chat completion or completion that has only one choice; "" for any other, and for b""."""
    choices = msgspec.json.decode(result, type=_StoredAnswer).choices if result else []
    if len(choices) != 1:
        return ""
    first = choices[0]
    return (first.message.content or "") if first.message is not None else first.text
