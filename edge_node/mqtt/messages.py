"""A message as a job, and a job's answer as a message.

A message's user properties may be the HTTP API's headers (``x-causeway-tags`` and its like), and its expiry is a
deadline. What it is known by when it comes again: its correlation data, or a CloudEvent's `source` and `id`; without
either the packet's number, which the broker gives to other messages later.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Literal

import msgspec

from router.errors import CausewayError, InvalidRequest, JobCancelled
from router.jobs.cloud_event import EventFormat
from router.jobs.job import REVISED, JobState, encode_job_error, revision_id
from router.jobs.submission import answer_text
from router.openai.answer import encode_error

from ..config.schema import MqttTopicConfig
from ..jobs.record import DueReply, EdgeJob
from .envelope import JSON, TEXT, Message, OutgoingAnswer, event_expires_s, event_headers, structured

_MAX_CORRELATION_BYTES = 1024


class AnswerAddress(msgspec.Struct, frozen=True):
    """What the answer to a message needs of it; stored with its job."""

    topic: str
    correlation: bytes = b""
    form: Literal["chat", "text"] = "chat"
    event: str = ""  # id of the CloudEvent that the message is
    source: str = ""  # that the answer, a CloudEvent as well, has
    event_format: EventFormat | None = None  # of a structured event; None: binary mode

    def encoded(self) -> bytes:
        return msgspec.msgpack.encode(self)


def address_of(message: Message, config: MqttTopicConfig, topic: str, client_id: str) -> AnswerAddress:
    """Return the address of a message's answer, which goes to `topic`."""
    event = message.event
    correlation = message.correlation[:_MAX_CORRELATION_BYTES]
    if event is None:
        return AnswerAddress(topic, correlation, config.form)
    return AnswerAddress(topic, correlation, config.form, event[1], f"/causeway/{client_id}", message.event_format)


# --- a message as a job ----------------------------------------------------------------------------------------------


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """A message as the intake of jobs takes it."""

    body: bytes
    headers: Mapping[str, str]
    deadline_ms: int | None  # if the headers have none, or a later one
    key: str  # under which it is known when it comes again
    is_new: bool  # an earlier job with this key is another one


def check_message(message: Message, max_bytes: int) -> None:
    """Check a message before it is read. Raises InvalidRequest."""
    if message.fault is not None:
        raise message.fault
    if message.retain:
        raise InvalidRequest("a retained message is no request: the broker would send it again and again")
    if len(message.payload) > max_bytes:
        raise InvalidRequest(f"the message is larger than {max_bytes} bytes")
    if len(message.correlation) > _MAX_CORRELATION_BYTES:
        raise InvalidRequest(f"the correlation data are longer than {_MAX_CORRELATION_BYTES} bytes")


def read_message(message: Message, config: MqttTopicConfig, unix: float) -> Submission:
    """Read a message. `unix`: now. Raises InvalidRequest, or DeadlineExceeded for an event that has expired."""
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
    """The text of a message as a chat request."""
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        raise InvalidRequest("the message is not UTF-8 text") from None
    if not text.strip():
        raise InvalidRequest("the message is empty")
    messages = [{"role": "system", "content": system}] if system else []
    return msgspec.json.encode({"model": "auto", "messages": [*messages, {"role": "user", "content": text}]})


def _key_of(message: Message, headers: Mapping[str, str]) -> str:
    """What a message has in common with itself when it comes again, and with no other one.

    A broker does not say which client sent it: one that takes another's `source`, `id` and content, with other tags,
    is another job, and does not have the other's refused.
    """
    number = str(message.mid) if message.is_known_by_number else ""
    digest = hashlib.sha256()
    own = (f"{name}: {headers[name]}" for name in sorted(headers) if name.startswith("x-causeway-"))
    for part in (message.topic, message.response_topic, number, *(message.event or ()), *own):
        digest.update(len(part.encode()).to_bytes(4, "big") + part.encode())
    digest.update(len(message.correlation).to_bytes(4, "big") + message.correlation + message.payload)
    return digest.hexdigest()


# --- an answer as a message ------------------------------------------------------------------------------------------


def answer_of(reply: DueReply) -> OutgoingAnswer:
    """Return the answer of a job, or the error that it ended with."""
    address, job = _address(reply), reply.job
    if job.state is not JobState.SUCCEEDED:
        error = job.error or encode_job_error(JobCancelled("the job was cancelled"))
        return _outgoing(address, b'{"error":' + error + b"}", JSON, job.state.value, job)
    if address.form == "text" and (text := answer_text(reply.result)):  # a tool call has no text
        return _outgoing(address, text.encode(), TEXT, job.state.value, job)
    return _outgoing(address, reply.result, JSON, job.state.value, job)


def error_answer(reply: DueReply, error: CausewayError) -> OutgoingAnswer:
    """Return this error in place of the answer of a job."""
    return _outgoing(_address(reply), encode_error(error), JSON, "failed", reply.job)


def _address(reply: DueReply) -> AnswerAddress:
    return msgspec.msgpack.decode(reply.address, type=AnswerAddress)


def refusal(address: AnswerAddress, error: CausewayError) -> OutgoingAnswer:
    """Return the answer to a message that is refused."""
    return _outgoing(address, encode_error(error), JSON, "refused")


def _outgoing(
    address: AnswerAddress, payload: bytes, content_type: str, status: str, job: EdgeJob | None = None
) -> OutgoingAnswer:
    """`job` None: the message did not become one."""
    properties = {"x-causeway-status": status}
    if job is not None:
        properties |= {"x-causeway-job": job.id, "x-causeway-decision": job.decision, "x-causeway-route": job.route}
        properties["x-causeway-revision"] = str(job.revision or "")
    if address.event:
        name = f"{address.event}.{status}" if job is None else revision_id(job.id, job.revision)
        kind = f"job.{status}" if job is None or not job.revision else REVISED
        properties |= {"specversion": "1.0", "id": name, "source": address.source, "type": f"causeway.{kind}"}
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
