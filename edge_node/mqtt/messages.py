"""The messages on the wire, also as CloudEvents, and their conversion: messages to jobs, and answers to messages.

A message's user properties may be the HTTP API's headers (``x-causeway-tags`` and the like), and its expiry is a
deadline. A redelivered message is identified by its correlation data, or by a CloudEvent's `source` and `id`; without
either, by the packet's number, which the broker later reuses for other messages.

CloudEvents over MQTT follow github.com/cloudevents/spec, bindings/mqtt-protocol-binding.md. A structured event is
treated as the same message in binary mode, whose attributes are user properties. Its answer is structured as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from causeway_server.router.errors import CausewayError, DeadlineExceeded, InvalidRequest, JobCancelled
from causeway_server.router.jobs.cloud_event import (
    CONTENT_TYPE,
    AnswerEvent,
    EventFormat,
    encode_event,
    event_format,
    parse_event,
)
from causeway_server.router.jobs.job import JobState, encode_job_error
from causeway_server.router.jobs.submission import answer_text
from causeway_server.router.openai.answer import encode_error

from ..config.schema import MqttTopicConfig
from ..jobs.record import DueReply, EdgeJob

JSON = "application/json"
TEXT = "text/plain; charset=utf-8"
_EVENT = ("specversion", "source", "id")
_STRUCTURED = "application/cloudevents"
_TAGS, _PRIORITY, _EXPIRY = "causewaytags", "causewaypriority", "expirytime"


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A message as it was received; a structured event is converted to binary mode.

    `mid`: the packet's number; `expires_s`: seconds until it expires; `properties`: the user properties by their names
    in lower case; `fault`: why the message is unreadable.
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
    event_format: EventFormat | None = None  # whether it was a structured event

    @property
    def event(self) -> tuple[str, str] | None:
        """The `source` and `id` of a CloudEvent."""
        version, source, event = (self.properties.get(name, "") for name in _EVENT)
        return (source, event) if version.startswith("1.") and source and event else None

    @property
    def is_known_by_number(self) -> bool:
        """Whether the message lacks an id of its own that identifies a redelivery."""
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
    """The connection failed, or was lost.

    Args:
        lasting: Whether an operator must act.
    """

    def __init__(self, message: str, *, lasting: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.lasting = lasting


class PublishRefused(Exception):
    """The broker refused a message, and stays connected."""


class AnswerTooLarge(Exception):
    """The message exceeds the broker's size limit."""


def in_binary_mode(message: Message, form: Literal["chat", "text"]) -> Message:
    """Return a structured event as a message in binary mode, and any other message unchanged.

    Args:
        form: Form of the event's `data`: "chat" for an object, "text" for a string.

    Raises:
        InvalidRequest: The message is not an event, or its `data` has another form.
        UnsupportedMediaType: The message has another event format, or contains several events.
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
    """Return user properties as headers of the API, including the meaning of an event's attributes."""
    headers = dict(properties)
    if not is_event:
        return headers
    if tags := headers.get(_TAGS):
        headers["x-causeway-tags"] = ",".join(filter(None, (headers.get("x-causeway-tags"), tags)))
    if priority := headers.get(_PRIORITY):
        headers.setdefault("x-causeway-priority", priority)
    return headers


def event_expires_s(properties: Mapping[str, str], unix: float) -> float | None:
    """Return the seconds until an event expires; None if it never does.

    Raises:
        InvalidRequest: Its `expirytime` is not an RFC 3339 time.
        DeadlineExceeded: It has expired.
    """
    if not (text := properties.get(_EXPIRY)):
        return None
    try:
        expiry: datetime = msgspec.convert(text, Annotated[datetime, Meta(tz=True)])
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"`{_EXPIRY}`: {error}", param=_EXPIRY) from None
    if (left_s := expiry.timestamp() - unix) <= 0.0:
        raise DeadlineExceeded("The event had expired when it was received.")
    return left_s


def structured(answer: OutgoingAnswer, kind: EventFormat, ended_unix: float | None) -> OutgoingAnswer:
    """Return an answer in binary mode as a structured event.

    Args:
        answer: The answer; its user properties hold the event's attributes.
        ended_unix: Time at which its job ended; None if it is not about a job.
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
        answer, payload=encode_event(event, kind), content_type=CONTENT_TYPE[kind], properties=tuple(properties.items())
    )


def _text_of(data: msgspec.Raw) -> bytes:
    try:
        return msgspec.json.decode(data, type=str).encode()
    except (msgspec.DecodeError, UnicodeError):
        raise InvalidRequest(
            "On this topic, `data` of an event must be text, as a JSON string.", param="data"
        ) from None


_MAX_CORRELATION_BYTES = 1024


class AnswerAddress(msgspec.Struct, frozen=True):
    """The fields of a message that its answer needs; stored with its job."""

    topic: str
    correlation: bytes = b""
    form: Literal["chat", "text"] = "chat"
    event: str = ""  # id of the CloudEvent in the message
    source: str = ""  # source of the answer, which is a CloudEvent as well
    event_format: EventFormat | None = None  # format of a structured event; None: binary mode

    def encoded(self) -> bytes:
        return msgspec.msgpack.encode(self)


def address_of(message: Message, config: MqttTopicConfig, topic: str, client_id: str) -> AnswerAddress:
    """Return the address of a message's answer, which is sent to `topic`."""
    event = message.event
    correlation = message.correlation[:_MAX_CORRELATION_BYTES]
    if event is None:
        return AnswerAddress(topic, correlation, config.form)
    return AnswerAddress(topic, correlation, config.form, event[1], f"/causeway/{client_id}", message.event_format)


# --- a message as a job ----------------------------------------------------------------------------------------------


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """A message in the form that the intake of jobs accepts."""

    body: bytes
    headers: Mapping[str, str]
    deadline_ms: int | None  # deadline, if the headers have none or a later one
    key: str  # key that identifies a redelivery
    is_new: bool  # whether an earlier job with this key is unrelated


def check_message(message: Message, max_bytes: int) -> None:
    """Check a message before it is parsed. Raises InvalidRequest."""
    if message.fault is not None:
        raise message.fault
    if message.retain:
        raise InvalidRequest(
            "A retained message cannot be a request, because the broker would send it again and again."
        )
    if len(message.payload) > max_bytes:
        raise InvalidRequest(f"The message is larger than {max_bytes} bytes.")
    if len(message.correlation) > _MAX_CORRELATION_BYTES:
        raise InvalidRequest(f"The correlation data are longer than {_MAX_CORRELATION_BYTES} bytes.")


def read_message(message: Message, config: MqttTopicConfig, unix: float) -> Submission:
    """Parse a message. `unix`: now. Raises InvalidRequest, or DeadlineExceeded for an event that has expired."""
    body = message.payload if config.form == "chat" else _chat_of(message.payload, config.system)
    is_event = message.event is not None
    headers = event_headers(message.properties, is_event=is_event)
    key = _key_of(message, headers)
    event_s = event_expires_s(message.properties, unix) if is_event else None
    deadlines_s = [one for one in (config.deadline_s, message.expires_s, event_s) if one is not None]
    deadline_ms = max(1, int(min(deadlines_s) * 1000.0)) if deadlines_s else None
    is_new = message.is_known_by_number and not message.dup
    return Submission(body=body, headers=headers, deadline_ms=deadline_ms, key=key, is_new=is_new)


def _chat_of(payload: bytes, system: str) -> bytes:
    """Return the text of a message as a chat request."""
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        raise InvalidRequest("The message is not UTF-8 text.") from None
    if not text.strip():
        raise InvalidRequest("The message is empty.")
    messages = [{"role": "system", "content": system}] if system else []
    return msgspec.json.encode({"model": "auto", "messages": [*messages, {"role": "user", "content": text}]})


def _key_of(message: Message, headers: Mapping[str, str]) -> str:
    """Return the deduplication key of a message.

    The broker does not tell which client sent a message. A message with the `source`, `id` and content of another
    client's message but other tags is therefore a separate job, and is not refused as a conflict.
    """
    number = str(message.mid) if message.is_known_by_number else ""
    digest = hashlib.sha256()
    fields = (f"{name}: {headers[name]}" for name in sorted(headers) if name.startswith("x-causeway-"))
    for part in (message.topic, message.response_topic, number, *(message.event or ()), *fields):
        digest.update(len(part.encode()).to_bytes(4, "big") + part.encode())
    digest.update(len(message.correlation).to_bytes(4, "big") + message.correlation + message.payload)
    return digest.hexdigest()


# --- an answer as a message ------------------------------------------------------------------------------------------


def answer_of(reply: DueReply) -> OutgoingAnswer:
    """Return the message with the answer of a job, or with the error with which it ended."""
    address, job = _address(reply), reply.job
    if job.state is not JobState.SUCCEEDED:
        error = job.error or encode_job_error(JobCancelled("The job was cancelled."))
        return _outgoing(address, b'{"error":' + error + b"}", JSON, job.state.value, job)
    if address.form == "text" and (text := answer_text(reply.result)):  # a tool call has no text
        return _outgoing(address, text.encode(), TEXT, job.state.value, job)
    return _outgoing(address, reply.result, JSON, job.state.value, job)


def error_answer(reply: DueReply, error: CausewayError) -> OutgoingAnswer:
    """Return the message that tells this error in place of a job's answer."""
    return _outgoing(_address(reply), encode_error(error), JSON, "failed", reply.job)


def _address(reply: DueReply) -> AnswerAddress:
    return msgspec.msgpack.decode(reply.address, type=AnswerAddress)


def refusal(address: AnswerAddress, error: CausewayError) -> OutgoingAnswer:
    """Return the answer to a message that is refused."""
    return _outgoing(address, encode_error(error), JSON, "refused")


def _outgoing(
    address: AnswerAddress, payload: bytes, content_type: str, status: str, job: EdgeJob | None = None
) -> OutgoingAnswer:
    """Return the message to publish. `job`: None if no job was made."""
    properties = {"x-causeway-status": status}
    if job is not None:
        properties |= {"x-causeway-job": job.id, "x-causeway-decision": job.decision, "x-causeway-route": job.route}
    if address.event:
        name = f"{address.event}.{status}" if job is None else job.id
        properties |= {"specversion": "1.0", "id": name, "source": address.source, "type": f"causeway.job.{status}"}
        properties["subject"] = address.event
    answer = OutgoingAnswer(
        topic=address.topic,
        payload=payload,
        content_type=content_type,
        correlation=address.correlation,
        properties=tuple((name, value) for name, value in properties.items() if value),
    )
    if address.event_format is None:
        return answer
    return structured(answer, address.event_format, None if job is None else job.ended_unix)
