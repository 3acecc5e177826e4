"""A job's body: an OpenAI request with fields of ours beside it, which are removed so that a plain request is left."""

from __future__ import annotations

import hashlib
import re
from typing import Final, Literal, TypeVar

import msgspec

from ..errors import InvalidRequest
from ..openai import check_field_names, parse_chat, parse_completion
from ..openai.request_body import load
from ..types import Request, RoutingHints

Priority = Literal["interactive", "standard", "bulk"]
Endpoint = Literal["/v1/chat/completions", "/v1/completions"]
RANK: Final[dict[Priority, int]] = {"interactive": 0, "standard": 1, "bulk": 2}
_KEY: Final = re.compile(r"[\x21-\x7e]{1,255}")


class JobFields(msgspec.Struct, frozen=True):
    """The fields of ours in a job's body. `deadline_ms` is the time left."""

    priority: Priority | None = None
    deadline_ms: int | None = None
    webhook: str = ""
    endpoint: Endpoint = "/v1/chat/completions"


F = TypeVar("F", bound=JobFields)


def split_body(body: bytes, kind: type[F]) -> tuple[F, bytes]:
    """Return our fields, and the body without them. The endpoint's parser reports what else is malformed.

    Raises:
        InvalidRequest: the body is no JSON object, repeats a key, or one of our fields is invalid or misspelt.
    """
    load(body)  # refuses a key that is given twice, which the decoder below would drop
    try:
        document = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidRequest("The body is not a JSON object.") from None
    names = kind.__struct_fields__
    known = frozenset((*names, "causeway"))
    check_field_names(document.keys() - known, known)
    fields = {name: document.pop(name) for name in names if name in document}
    if not fields:
        return kind(), body
    try:
        extensions = msgspec.json.decode(msgspec.json.encode(fields), type=kind)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$.")
        raise InvalidRequest(reason, param=path.rstrip("`") or None) from None
    return extensions, msgspec.json.encode(document)


def parse_job_request(endpoint: Endpoint, body: bytes, hints: RoutingHints) -> Request:
    """Parse the request of a job. The tags of `hints` join those of the body. Raises InvalidRequest."""
    parse = parse_chat if endpoint == "/v1/chat/completions" else parse_completion
    return parse(body, hints)


def key_digest(key: str) -> str:
    """Return the digest of an Idempotency-Key, which is stored in its place: a key may be a secret.

    Raises InvalidRequest.
    """
    if not key:
        return ""
    if not _KEY.fullmatch(key):
        raise InvalidRequest("`Idempotency-Key` is 1 to 255 visible ASCII characters")
    return hashlib.sha256(key.encode()).hexdigest()
