"""A message as it was received, and an answer as it is published."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from router.errors import InvalidRequest
from router.jobs.cloud_event import CONTENT_TYPE, EventFormat

JSON = "application/json"
TEXT = "text/plain; charset=utf-8"
_EVENT = ("specversion", "source", "id")


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
