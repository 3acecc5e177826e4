"""Compaction: the model summarizes a conversation, and the client sends the summary on in its place.

A compaction item is opaque, but not encrypted: its client has seen what it stands for. It goes on at any device and
gateway, and carries what binds the conversation: to the device, and to regions.
"""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from ...errors import InvalidRequest
from ..request_body import JSONObject, load, validate
from ..wire import MAX_TAGS, Tag

COMPACT_PATH: Final = "/v1/responses/compact"
COMPACT: Final = (
    "Summarize our conversation so far, so that it can go on from your summary alone. Keep the goals, decisions, "
    "facts, names, numbers, results of tools and open tasks. Write only the summary."
)
_FORM: Final = "causeway1."
_encode = msgspec.json.encode


class Compacted(msgspec.Struct, frozen=True):
    """The content of a compaction item. `private`: what continues it stays on the device; `tags`: in these regions."""

    summary: str
    private: bool = False
    tags: Annotated[tuple[Tag, ...], Meta(max_length=MAX_TAGS)] = ()

    def seal(self) -> str:
        """Return the `encrypted_content` of its item."""
        return _FORM + base64.urlsafe_b64encode(_encode(self)).decode()


def open_compaction(content: str) -> Compacted:
    """Read the `encrypted_content` of an item. Raises InvalidRequest."""
    try:
        form, data = content[: len(_FORM)], base64.urlsafe_b64decode(content[len(_FORM) :].encode())
        if form == _FORM:
            return msgspec.json.decode(data, type=Compacted)
    except (binascii.Error, UnicodeError, msgspec.DecodeError, msgspec.ValidationError):
        pass
    message = "`input`: the `encrypted_content` of a compaction item was not made by Causeway. Send the items instead."
    raise InvalidRequest(message, param="input")


class WireCompaction(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The body of `POST /v1/responses/compact`."""

    model: str
    input: str | Annotated[list[JSONObject], Meta(min_length=1)] | None = None
    previous_response_id: str | None = None
    instructions: str | None = None
    prompt_cache_key: str | None = None


def compaction_request(body: bytes) -> bytes:
    """Return the body of the request for a response whose answer is the summary. Raises InvalidRequest."""
    wire = validate(load(body), WireCompaction)
    items = [{"role": "user", "content": wire.input}] if isinstance(wire.input, str) else wire.input or []
    if not items and wire.previous_response_id is None:
        raise InvalidRequest("`input` is missing. Send `input`, or a `previous_response_id`.", param="input")
    ask: JSONObject = {"role": "user", "content": COMPACT}
    return _encode({**msgspec.to_builtins(wire), "input": [*items, ask], "store": False})
