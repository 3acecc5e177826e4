"""The outcome of a message, published exactly once: its answer, its expiry, or a dead letter with the reason."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final, Literal
from urllib.parse import quote

import msgspec

from causeway_server.router.errors import CausewayError, InvalidRequest
from causeway_server.router.jobs.job import encode_job_error
from causeway_server.router.serving.request import OURS

from ..brokers.port import IncomingMessage, OutgoingMessage
from .cloud_event import CONTENT_TYPE, AnswerEvent, CloudEvent, EventFormat, encode_event, event_format, parse_event

OutcomeKind = Literal["answered", "expired", "dead"]
_TYPE: Final = "causeway."
_CONTENT_TYPE_HEADER: Final = "content-type"
AUTHORIZATION: Final = "authorization"
"""The header of a message with a token. The token's device is then the sender."""


class StreamMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A received message, parsed once. `event`: None if it is unreadable, for the reason `fault`."""

    effect: str  # digest of the message's subject; another message with the same digest has no effect of its own
    key: str  # ordering key; "" for no order
    format: EventFormat
    event: CloudEvent | None = None
    fault: CausewayError | None = None

    def expires_at(self, max_age_s: float) -> float:
        """Return when the message expires, Unix time in seconds; infinity for never."""
        if self.event is None:
            return float("inf")
        ends = [self.event.expirytime.timestamp()] if self.event.expirytime is not None else []
        if max_age_s and self.event.time is not None:
            ends.append(self.event.time.timestamp() + max_age_s)
        return min(ends, default=float("inf"))


class StreamOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome published for a message; Redis stores it as msgpack until the broker has it."""

    kind: OutcomeKind
    message: OutgoingMessage


class _DeadLetterData(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Data of a dead letter's event. `message` holds the received message in Base64."""

    error: msgspec.Raw
    attempts: int
    position: str
    content_type: str
    message: str = ""


def read_message(incoming: IncomingMessage, topic: str) -> StreamMessage:
    """Parse a message. `topic` and the position identify messages without an id."""
    kind: EventFormat = "json"
    try:
        kind = event_format(incoming.headers.get(_CONTENT_TYPE_HEADER, ""))
        _refuse_routing_headers(incoming.headers)
        event = parse_event(incoming.body, kind)
    except CausewayError as error:
        effect = _digest("unreadable", topic, incoming.position)
        return StreamMessage(effect=effect, key=incoming.key, format=kind, fault=error)
    # Brokers do not say which producer sent a message. One that takes another's `source` and `id` has another token or
    # other content: it is not answered, nor refused, in the other's place.
    sender = incoming.headers.get(AUTHORIZATION, "")
    content = hashlib.blake2b(incoming.body, digest_size=16).hexdigest()
    effect = _digest("event", sender, event.source, event.id, content)
    return StreamMessage(effect=effect, key=event.partitionkey or incoming.key, format=kind, event=event)


def _refuse_routing_headers(headers: Iterable[str]) -> None:
    """Refuse headers that NATS clients could lose: they keep one of several lines. Raises InvalidRequest."""
    for name in headers:
        if name.startswith(OURS):
            message = (
                f"A message must not have the header `{name[:64]}`, because its event has "
                "`causewaytags` and `causewaypriority`."
            )
            raise InvalidRequest(message, param=name[:64])


class OutcomeWriter:
    """Encodes a pipeline's events. `name`: name of the pipeline; `now`: Unix seconds."""

    def __init__(self, name: str) -> None:
        self._source = f"/causeway/streams/{name}"

    def answered(self, message: StreamMessage, body: bytes, now: float) -> StreamOutcome:
        """Return the outcome of an answered message. `body`: OpenAI's answer."""
        return self._outcome(message, "answered", body, now)

    def expired(self, message: StreamMessage, error: CausewayError, now: float) -> StreamOutcome:
        return self._outcome(message, "expired", b'{"error":' + encode_job_error(error) + b"}", now)

    def dead(
        self,
        message: StreamMessage,
        incoming: IncomingMessage,
        error: CausewayError,
        attempts: int,
        now: float,
        max_bytes: int,
    ) -> StreamOutcome:
        """Return a dead letter. `max_bytes`: maximum size of the event; the message is left out if it does not fit."""
        letter = _DeadLetterData(
            error=msgspec.Raw(encode_job_error(error)),
            attempts=attempts,
            position=incoming.position,
            content_type=incoming.headers.get(_CONTENT_TYPE_HEADER, ""),
            message=base64.b64encode(incoming.body).decode(),
        )
        outcome = self._outcome(message, "dead", msgspec.json.encode(letter), now)
        if len(outcome.message.body) <= max_bytes:
            return outcome
        letter = msgspec.structs.replace(letter, message="")
        return self._outcome(message, "dead", msgspec.json.encode(letter), now)

    def _outcome(self, message: StreamMessage, kind: OutcomeKind, data: bytes, now: float) -> StreamOutcome:
        event, source = message.event, self._source
        if event is not None:  # ids are unique within a source only
            source = f"{source}?source={quote(event.source, safe='')}&message={message.effect[:16]}"
        written = AnswerEvent(
            specversion="1.0",
            id=message.effect if event is None else event.id,
            source=source,
            type=_TYPE + kind,
            time=datetime.fromtimestamp(now, UTC),
            requestsource="" if event is None else event.source,
            partitionkey=message.key,
            traceparent="" if event is None else event.traceparent,
            tracestate="" if event is None else event.tracestate,
            data=msgspec.Raw(data),
        )
        body = encode_event(written, message.format)
        outgoing = OutgoingMessage(
            id=message.effect, body=body, content_type=CONTENT_TYPE[message.format], key=message.key
        )
        return StreamOutcome(kind=kind, message=outgoing)


def _digest(*parts: str) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part.encode()).to_bytes(4, "big") + part.encode())
    return digest.hexdigest()
