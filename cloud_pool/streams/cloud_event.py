"""CloudEvents 1.0 (github.com/cloudevents/spec) in structured mode, as JSON or as MessagePack.

MessagePack is not a format of the specification: it has the JSON format's members, with `data` as a MessagePack value.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from causeway_server.router.errors import InvalidRequest, UnsupportedMediaType
from causeway_server.router.types import Priority

EventFormat = Literal["json", "msgpack"]
CONTENT_TYPE: Final[Mapping[EventFormat, str]] = {
    "json": "application/cloudevents+json",
    "msgpack": "application/cloudevents+msgpack",
}
_FORMATS: Final[Mapping[str, EventFormat]] = {
    "": "json",
    "application/json": "json",
    "application/cloudevents+json": "json",
    "application/msgpack": "msgpack",
    "application/cloudevents+msgpack": "msgpack",
}
_NO_DATA: Final = msgspec.Raw(b"")
_Text = Annotated[str, Meta(min_length=1, max_length=1024)]
_Time = Annotated[datetime, Meta(tz=True)]


class CloudEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An event, with the attributes that are used; others are ignored."""

    specversion: Literal["1.0"]
    id: _Text
    source: _Text
    type: _Text
    time: _Time | None = None
    datacontenttype: str = ""
    partitionkey: str = ""  # messages with the same key are answered in order
    expirytime: _Time | None = None
    traceparent: str = ""
    tracestate: str = ""
    causewaypriority: Priority | None = None
    causewaytags: str = ""  # tags, separated by commas
    data: msgspec.Raw = _NO_DATA


class AnswerEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An event about a message. `partitionkey` and the trace context are copied from the message."""

    specversion: Literal["1.0"]  # always written, because it has no default
    id: str
    source: str
    type: str
    time: datetime | None = None
    datacontenttype: str = "application/json"
    subject: str = ""  # `id` of the message, if the event has an id of its own
    requestsource: str = ""  # `source` of the message
    partitionkey: str = ""
    traceparent: str = ""
    tracestate: str = ""
    data: msgspec.Raw


_JSON: Final = msgspec.json.Decoder(CloudEvent)
_MSGPACK: Final = msgspec.msgpack.Decoder(CloudEvent)


def event_format(content_type: str) -> EventFormat:
    """Return the format of a content type; without one, JSON. Raises UnsupportedMediaType."""
    name = content_type.partition(";")[0].strip().lower()
    if name not in _FORMATS:
        raise UnsupportedMediaType(f"The content type {name[:64]!r} must be one of {', '.join(_FORMATS)[2:]}.")
    return _FORMATS[name]


def parse_event(body: bytes, kind: EventFormat) -> CloudEvent:
    """Parse a message and convert its `data` to JSON. Raises InvalidRequest."""
    try:
        event = (_JSON if kind == "json" else _MSGPACK).decode(body)
        if not bytes(event.data):
            raise InvalidRequest("The event has no `data`.", param="data")
        if kind == "msgpack":
            data = msgspec.json.encode(msgspec.msgpack.decode(event.data))
            event = msgspec.structs.replace(event, data=msgspec.Raw(data))
        return event
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError, ValueError) as error:
        # Only the message of a validation error does not quote the content.
        reason = f": {error}" if isinstance(error, msgspec.ValidationError) else ""
        raise InvalidRequest(f"The message is not a CloudEvent in {kind}{reason}") from None


def encode_event(event: AnswerEvent, kind: EventFormat) -> bytes:
    """Encode an event whose `data` is JSON."""
    if kind == "json":
        return msgspec.json.encode(event)
    data = msgspec.msgpack.encode(msgspec.json.decode(event.data))
    return msgspec.msgpack.encode(msgspec.structs.replace(event, data=msgspec.Raw(data)))
