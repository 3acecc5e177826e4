"""The input of a call: InputChunks → the body of an HTTP request → Request, with the same rules and messages.

The first chunk has the request. Further ones add to its last message: text, audio and images, in their order.
"""

from __future__ import annotations

import base64
import math
import re
from typing import Any

import msgspec

from causeway_server.router.errors import InvalidRequest, MissingField
from causeway_server.router.openai.chat import parse_chat
from causeway_server.router.openai.completions import parse_completion

from ..http.request_admission import Parse

_JSON = dict[str, Any]
_NOT_A_PARAMETER = {
    "messages": "it is a field of the request, so set that",
    "stream": "a call is always streamed, so remove it",
    "stream_options": "a call always ends with its usage, so remove it",
}
_LARGEST_WHOLE = 2.0**53  # of a double: beyond it neighbours are more than one apart
_encode = msgspec.json.Encoder().encode
_IMAGE = re.compile(r"image/[\w.+-]+", re.ASCII)
_HEADS = {"audio": "format", "image": "media_type"}
"""The field that only the first chunk of a part has, by kind of part."""


class RequestInput:
    """The collected chunks of one call. Text continues the previous text, and bytes the previous audio or image."""

    def __init__(self) -> None:
        self._request: Any = None
        self._parts: list[_Part] = []

    def add(self, chunk: Any) -> None:
        """Add an InputChunk. Raises InvalidRequest."""
        kind = chunk.WhichOneof("input")
        if kind == "request" and self._request is None:
            self._request = chunk.request
        elif kind not in (None, "request") and self._request is not None:
            self._add(kind, getattr(chunk, kind))
        else:
            raise InvalidRequest(
                "The first InputChunk of a call must have `request`, and every further one `text`, `audio` or `image`.",
                param=kind or "input",
            )

    def body(self) -> tuple[bytes, Parse]:
        """Return the body of the equivalent HTTP request, and the parser for it. Raises InvalidRequest."""
        if self._request is None:
            raise MissingField("The input has no chunk. First send a chunk with `request`.", param="request")
        for name, reason in _NOT_A_PARAMETER.items():
            if name in self._request.parameters:
                raise InvalidRequest(f"`parameters.{name}`: {reason}.", param=f"parameters.{name}")
        body = _object(self._request, "parameters", "")
        if "prompt" in body and "messages" in body:
            raise InvalidRequest(
                "`messages` are for a chat and `prompt` is for a completion. Send only one of them.", param="prompt"
            )
        self._add_parts_to(body)
        parse = parse_completion if "prompt" in body else parse_chat
        return _encode({**body, "stream": True}), parse

    def _add(self, kind: str, value: Any) -> None:
        """Add the field `kind` of an InputChunk: text, audio or image. Raises InvalidRequest."""
        continued = bool(self._parts) and self._parts[-1].kind == kind
        if kind == "text":
            head, data = "", value.encode()
        else:
            head, data = _head(kind, value, continued=continued), value.data
        if head or not continued:
            self._parts.append(_Part(kind, head, bytearray()))
        self._parts[-1].data += data

    def _add_parts_to(self, body: _JSON) -> None:
        """Add the further chunks to the last message of an HTTP body, or text to its prompt. Raises InvalidRequest."""
        if not self._parts:
            return
        kinds = [part.kind for part in self._parts]
        messages = body.get("messages")
        holder, name = (messages[-1], "content") if messages else (body, "prompt")
        begun = holder.get(name, "" if messages else None)
        if not isinstance(begun, str):
            raise InvalidRequest(
                f"`{kinds[0]}` continues a text, so the `content` of the last message, or `prompt`, must be a string.",
                param=kinds[0],
            )
        parts = [part.as_json() for part in self._parts]
        if kinds[0] == "text":
            parts[0]["text"] = begun + parts[0]["text"]
        elif begun:
            parts.insert(0, {"type": "text", "text": begun})
        if kinds == ["text"]:
            holder[name] = parts[0]["text"]
        elif messages:
            holder[name] = parts
        else:
            other = next(kind for kind in kinds if kind != "text")
            raise InvalidRequest(
                f"`{other}` is a part of a message, but the request has a `prompt`. Send `messages` instead.",
                param=other,
            )


def _object(message: Any, struct: str, path: str) -> _JSON:
    """Return a message as JSON: the members of its field `struct` become siblings of its other fields."""
    members = _members(getattr(message, struct).fields, f"{path}{struct}.")
    for field, value in message.ListFields():
        name = field.name
        if name == struct:
            continue
        if name in members:
            raise InvalidRequest(
                f"`{path}{name}` is also in `{path}{struct}`. Set only one of them.", param=f"{path}{name}"
            )
        members[name] = _field(value, f"{path}{name}")
    return members


def _field(value: Any, path: str) -> Any:
    if path == "messages":
        return [_object(one, "fields", f"{path}[{at}].") for at, one in enumerate(value)]
    if path == "stop":
        return list(value)
    return _finite(value, path) if isinstance(value, float) else value


def _members(fields: Any, path: str) -> _JSON:
    return {name: _value(value, f"{path}{name}") for name, value in fields.items()}


def _value(value: Any, path: str) -> Any:
    """Convert a google.protobuf.Value, whose numbers are all doubles."""
    kind = value.WhichOneof("kind")
    if kind == "struct_value":
        return _members(value.struct_value.fields, f"{path}.")
    if kind == "list_value":
        return [_value(item, f"{path}[{at}]") for at, item in enumerate(value.list_value.values)]
    if kind == "number_value":
        number = _finite(value.number_value, path)
        return int(number) if number.is_integer() and abs(number) <= _LARGEST_WHOLE else number
    return None if kind in (None, "null_value") else getattr(value, kind)


def _finite(value: float, path: str) -> float:
    if not math.isfinite(value):
        raise InvalidRequest(f"`{path}` is not a number that JSON can express.", param=path)
    return value


class _Part(msgspec.Struct):
    """A part: text in UTF-8, or the bytes of audio or an image. `head`: its format or media type."""

    kind: str
    head: str
    data: bytearray

    def as_json(self) -> _JSON:
        if self.kind == "text":
            return {"type": "text", "text": self.data.decode()}
        encoded = base64.b64encode(self.data).decode()
        if self.kind == "audio":
            return {"type": "input_audio", "input_audio": {"data": encoded, "format": self.head}}
        return {"type": "image_url", "image_url": {"url": f"data:{self.head};base64,{encoded}"}}


def _head(kind: str, value: Any, *, continued: bool) -> str:
    """Return the format or media type; "" for the continuation of a part. Raises InvalidRequest."""
    field = _HEADS[kind]
    head: str = getattr(value, field)
    if not head and not continued:
        raise InvalidRequest(
            f"`{kind}.{field}` is missing in the first InputChunk of this part.", param=f"{kind}.{field}"
        )
    if head and kind == "image" and not _IMAGE.fullmatch(head):
        raise InvalidRequest(
            "`image.media_type` must be the image's type, such as image/png.", param="image.media_type"
        )
    return head
