"""A message as it was received, an answer as it is published, and both as CloudEvents.

CloudEvents by MQTT follow github.com/cloudevents/spec, bindings/mqtt-protocol-binding.md. A structured event is taken
as the same message in binary mode, whose attributes are user properties. Its answer is structured as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from router.errors import DeadlineExceeded, InvalidRequest
from router.jobs.cloud_event import CONTENT_TYPE, AnswerEvent, EventFormat, encode_event, event_format, parse_event

JSON = "application/json"
TEXT = "text/plain; charset=utf-8"
_EVENT = ("specversion", "source", "id")
_STRUCTURED = "application/cloudevents"
_TAGS, _PRIORITY, _EXPIRY = "causewaytags", "causewaypriority", "expirytime"


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A message as it was received; a structured event as one in binary mode.

    `mid`: the packet's number; `expires_s`: the time that it is still of use; `properties`: the user properties by
    their names in lower case; `fault`: why they cannot be read.
    """

    mid: int
    topic: str
    payload: bytes
    qos: int
    retain: bool
    dup: bool
    response_topic: str = ""
    correlation: bytes = b""
    expires_s: int | None = None
    content_type: str = ""
    properties: Mapping[str, str] = {}
    fault: InvalidRequest | None = None
    event_format: EventFormat | None = None  # it was a structured event

    @property
    def event(self) -> tuple[str, str] | None:
        """`source` and `id` of a CloudEvent."""
        version, source, event = (self.properties.get(name, "") for name in _EVENT)
        return (source, event) if version.startswith("1.") and source and event else None

    @property
    def is_known_by_number(self) -> bool:
        """It says nothing of its own by which it could be known when it comes again."""
        return not self.correlation and self.event is None


class OutgoingAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A message that is published with QoS 1, and never retained."""

    topic: str
    payload: bytes
    content_type: str
    correlation: bytes = b""
    properties: tuple[tuple[str, str], ...] = ()

    @property
    def is_text(self) -> bool:
        """Whether the payload is UTF-8."""
        return self.content_type != CONTENT_TYPE["msgpack"]


class BrokerError(Exception):
    """The connection cannot be made, or was lost.

    Args:
        message: for operators.
        lasting: a person must act.
    """

    def __init__(self, message: str, *, lasting: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.lasting = lasting


class PublishRefused(Exception):
    """The broker refuses a message, and goes on."""


class AnswerTooLarge(Exception):
    """The broker takes no message of this size."""


def in_binary_mode(message: Message, form: Literal["chat", "text"]) -> Message:
    """Return a structured event as a message in binary mode, and any other message as it is.

    Args:
        form: of the event's `data`: an object, or with "text" a string.

    Raises:
        InvalidRequest: it is no event, or its `data` has another form.
        UnsupportedMediaType: it is an event in another format, or several.
    """
    if not message.content_type.lower().startswith(_STRUCTURED):
        return message
    kind = event_format(message.content_type)
    event = parse_event(message.payload, kind)
    tags = ",".join(filter(None, (message.properties.get(_TAGS), event.causewaytags)))
    attributes = {
        "specversion": event.specversion,
        "id": event.id,
        "source": event.source,
        "type": event.type,
        _TAGS: tags,
        _PRIORITY: event.causewaypriority or "",
        _EXPIRY: "" if event.expirytime is None else event.expirytime.isoformat(),
    }
    payload = _text_of(event.data) if form == "text" else bytes(event.data)
    properties = {**message.properties, **{name: value for name, value in attributes.items() if value}}
    return msgspec.structs.replace(message, payload=payload, properties=properties, event_format=kind)


def event_headers(properties: Mapping[str, str], *, is_event: bool) -> dict[str, str]:
    """Return user properties as headers of the API, with what the attributes of an event mean."""
    headers = dict(properties)
    if not is_event:
        return headers
    if tags := headers.get(_TAGS):
        headers["x-causeway-tags"] = ",".join(filter(None, (headers.get("x-causeway-tags"), tags)))
    if priority := headers.get(_PRIORITY):
        headers.setdefault("x-causeway-priority", priority)
    return headers


def event_expires_s(properties: Mapping[str, str], unix: float) -> float | None:
    """Return the seconds until an event expires; None: never.

    Raises:
        InvalidRequest: its `expirytime` is no RFC 3339 time.
        DeadlineExceeded: it has expired.
    """
    if not (text := properties.get(_EXPIRY)):
        return None
    try:
        expiry: datetime = msgspec.convert(text, Annotated[datetime, Meta(tz=True)])
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"`{_EXPIRY}`: {error}", param=_EXPIRY) from None
    if (left_s := expiry.timestamp() - unix) <= 0.0:
        raise DeadlineExceeded("the event had expired when it was received")
    return left_s


def structured(answer: OutgoingAnswer, kind: EventFormat, ended_unix: float | None) -> OutgoingAnswer:
    """Return an answer in binary mode as a structured event.

    Args:
        answer: its user properties hold the event's attributes.
        ended_unix: when its job ended; None: it is about no job.
    """
    properties = dict(answer.properties)
    is_json = answer.content_type == JSON
    data = answer.payload if is_json else msgspec.json.encode(answer.payload.decode())
    event = AnswerEvent(
        specversion="1.0",
        id=properties.pop("id"),
        source=properties.pop("source"),
        type=properties.pop("type"),
        subject=properties.pop("subject"),
        time=None if ended_unix is None else datetime.fromtimestamp(ended_unix, UTC),
        datacontenttype=answer.content_type,
        data=msgspec.Raw(data),
    )
    del properties["specversion"]
    return msgspec.structs.replace(
        answer,
        payload=encode_event(event, kind),
        content_type=CONTENT_TYPE[kind],
        properties=tuple(properties.items()),
    )


def _text_of(data: msgspec.Raw) -> bytes:
    try:
        return msgspec.json.decode(data, type=str).encode()
    except (msgspec.DecodeError, UnicodeError):
        raise InvalidRequest("`data` of an event on this topic is text, a JSON string", param="data") from None
