"""The messages on the wire, and their conversion: messages to jobs, and answers to messages.

A message's user properties may be the HTTP API's headers (``x-causeway-tags`` and the like), and its expiry is a
deadline. A redelivered message is identified by its correlation data; without any, by the packet's number, which the
broker later reuses for other messages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Literal

import msgspec

from causeway_server.router.errors import CausewayError, InvalidRequest, JobCancelled, UnsupportedMediaType
from causeway_server.router.jobs.job import JobState, encode_job_error
from causeway_server.router.jobs.submission import answer_text
from causeway_server.router.openai.answer import encode_error

from ..config.schema import MqttTopicConfig
from ..jobs.record import DueReply, EdgeJob

JSON = "application/json"
TEXT = "text/plain; charset=utf-8"
_EVENT = "application/cloudevents"
_EVENT_PROPERTIES = ("specversion", "causewaytags", "causewaypriority", "expirytime")  # of an event in binary mode


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A message as it was received. `mid`: the packet's number; `expires_s`: seconds until it expires; `properties`:
    the user properties by lower-case name; `fault`: why the message is unreadable.
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

    @property
    def is_known_by_number(self) -> bool:
        """Whether the message lacks an id of its own that identifies a redelivery."""
        return not self.correlation


class OutgoingAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A message that is published with QoS 1, and never retained."""

    topic: str
    payload: bytes
    content_type: str
    correlation: bytes = b""
    properties: tuple[tuple[str, str], ...] = ()


class BrokerError(Exception):
    """The connection failed, or was lost. `lasting`: whether an operator must act."""

    def __init__(self, message: str, *, lasting: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.lasting = lasting


class PublishRefused(Exception):
    """The broker refused a message, and stays connected."""


class AnswerTooLarge(Exception):
    """The message exceeds the broker's size limit."""


_MAX_CORRELATION_BYTES = 1024


class AnswerAddress(msgspec.Struct, frozen=True):
    """The fields of a message that its answer needs; stored with its job."""

    topic: str
    correlation: bytes = b""
    form: Literal["chat", "text"] = "chat"

    def encoded(self) -> bytes:
        return msgspec.msgpack.encode(self)


def address_of(message: Message, config: MqttTopicConfig, topic: str) -> AnswerAddress:
    """Return the address of a message's answer, which is sent to `topic`."""
    return AnswerAddress(topic, message.correlation[:_MAX_CORRELATION_BYTES], config.form)


# --- a message as a job ----------------------------------------------------------------------------------------------


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """A message in the form that the intake of jobs accepts."""

    body: bytes
    headers: Mapping[str, str]
    deadline_ms: int | None  # deadline, if the headers have none or a later one
    key: str  # key that identifies a redelivery
    is_new: bool  # whether an earlier job with this key is unrelated


def check_message(message: Message, max_bytes: int) -> None:
    """Check a message before it is parsed. Raises InvalidRequest or UnsupportedMediaType."""
    if message.fault is not None:
        raise message.fault
    if message.retain:
        raise InvalidRequest(
            "A retained message cannot be a request, because the broker would send it again and again."
        )
    if message.content_type.lower().startswith(_EVENT) or any(name in message.properties for name in _EVENT_PROPERTIES):
        raise UnsupportedMediaType(
            "CloudEvents are not read. Send the event's `data` as the message, its tags and priority as the user"
            " properties `x-causeway-tags` and `x-causeway-priority`, and its expiry time as the message's expiry."
        )
    if len(message.payload) > max_bytes:
        raise InvalidRequest(f"The message is larger than {max_bytes} bytes.")
    if len(message.correlation) > _MAX_CORRELATION_BYTES:
        raise InvalidRequest(f"The correlation data are longer than {_MAX_CORRELATION_BYTES} bytes.")


def read_message(message: Message, config: MqttTopicConfig) -> Submission:
    """Parse a message. Raises InvalidRequest."""
    body = message.payload if config.form == "chat" else _chat_of(message.payload, config.system)
    deadlines_s = [one for one in (config.deadline_s, message.expires_s) if one is not None]
    deadline_ms = max(1, int(min(deadlines_s) * 1000.0)) if deadlines_s else None
    is_new = message.is_known_by_number and not message.dup
    return Submission(
        body=body, headers=message.properties, deadline_ms=deadline_ms, key=_key_of(message), is_new=is_new
    )


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


def _key_of(message: Message) -> str:
    """Return the deduplication key of a message. The broker does not tell which client sent it: with the correlation
    data and content of another's, but other tags, it is a separate job, and not refused as a conflict.
    """
    headers = message.properties
    number = str(message.mid) if message.is_known_by_number else ""
    digest = hashlib.sha256()
    fields = (f"{name}: {headers[name]}" for name in sorted(headers) if name.startswith("x-causeway-"))
    for part in (message.topic, message.response_topic, number, *fields):
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
    return OutgoingAnswer(
        topic=address.topic,
        payload=payload,
        content_type=content_type,
        correlation=address.correlation,
        properties=tuple((name, value) for name, value in properties.items() if value),
    )
