"""What the InputChunks after the first one add to the last message: text, sounds and pictures, in their order."""

from __future__ import annotations

import base64
import re
from typing import Any

import msgspec

from router.errors import InvalidRequest

_JSON = dict[str, Any]
_PICTURE = re.compile(r"image/[\w.+-]+", re.ASCII)
_HEADS = {"audio": "format", "image": "media_type"}
"""The field that only the first chunk of a part has, by kind."""


class _Part(msgspec.Struct):
    """Text in UTF-8, or the bytes of a sound or picture. `head`: its format or media type."""

    kind: str
    head: str
    data: bytearray

    def as_json(self) -> _JSON:
        """The part as a chat has it."""
        if self.kind == "text":
            return {"type": "text", "text": self.data.decode()}
        encoded = base64.b64encode(self.data).decode()
        if self.kind == "audio":
            return {"type": "input_audio", "input_audio": {"data": encoded, "format": self.head}}
        return {"type": "image_url", "image_url": {"url": f"data:{self.head};base64,{encoded}"}}


class AddedParts:
    """Collects them. Text continues the text before it, and bytes the sound or the picture before them."""

    def __init__(self) -> None:
        self._parts: list[_Part] = []

    def add(self, kind: str, value: Any) -> None:
        """Take the field `kind` of an InputChunk: text, audio or image. Raises InvalidRequest."""
        continued = bool(self._parts) and self._parts[-1].kind == kind
        if kind == "text":
            head, data = "", value.encode()
        else:
            head, data = _head(kind, value, continued=continued), value.data
        if head or not continued:
            self._parts.append(_Part(kind, head, bytearray()))
        self._parts[-1].data += data

    def add_to(self, body: _JSON) -> None:
        """Add them to the last message of an HTTP body, or text to its prompt. Raises InvalidRequest."""
        if not self._parts:
            return
        kinds = [part.kind for part in self._parts]
        messages = body.get("messages")
        holder, name = (messages[-1], "content") if messages else (body, "prompt")
        begun = holder.get(name, "" if messages else None)
        if not isinstance(begun, str):
            raise InvalidRequest(
                f"`{kinds[0]}` continues the last message's `content` or `prompt`, if that is text.", param=kinds[0]
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
                f"`{other}` is a part of a message, and a `prompt` has none. Send `messages`.", param=other
            )


def _head(kind: str, value: Any, *, continued: bool) -> str:
    """Return the format or media type; "" where a part continues. Raises InvalidRequest."""
    field = _HEADS[kind]
    head: str = getattr(value, field)
    if not head and not continued:
        raise InvalidRequest(f"`{kind}.{field}` is missing in the first InputChunk of it.", param=f"{kind}.{field}")
    if head and kind == "image" and not _PICTURE.fullmatch(head):
        raise InvalidRequest("`image.media_type`: send the picture's type, as image/png.", param="image.media_type")
    return head
