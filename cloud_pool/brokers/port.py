"""The port between a pipeline and a broker. `tests/streams` holds every adapter to what is written here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import msgspec

from router.errors import CausewayError

from .address import MessageRange

_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class BrokerUnavailable(CausewayError, status=503, code="broker_unavailable", retryable=True):
    """The broker does not answer, or refuses. Whether it carried out the last command is unknown."""


class MessageTooLarge(CausewayError, status=413, code="message_too_large"):
    """The broker takes no message of this size."""


class IncomingMessage(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One delivery of a message."""

    body: bytes
    headers: Mapping[str, str] = _NO_HEADERS  # names in lower case
    key: str = ""  # the broker's own key; "": none
    lane: str = ""  # the partition that it came from; "": the broker has none
    position: str  # its place in the topic: the same in each delivery, and no other message's
    published_at: float  # unix s, by the broker's clock
    receipt: object = None  # the adapter's own


class OutgoingMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message to publish. `id` is the same whenever the same message is published again."""

    id: str
    body: bytes
    content_type: str
    key: str = ""


class TopicLag(msgspec.Struct, frozen=True):
    """What a pipeline has still to do."""

    waiting: int  # messages that were not delivered yet
    unacknowledged: int  # delivered, and not acknowledged


class MessageSource(Protocol):
    """Messages of a topic for one pipeline. Every method raises BrokerUnavailable while the broker does not answer.

    1. A message is delivered until it is acknowledged: again after a lost connection, a killed pipeline or broker.
    2. First deliveries come in the order of the topic (of each lane, where it has lanes). After a loss all messages
       that were not acknowledged come again, in this order, before any new one.
    3. Only one process at a time may receive, where `needs_lease`; elsewhere the broker divides the lanes.
    """

    needs_lease: bool

    async def open(self) -> None:
        """Connect, waiting for the broker as long as it takes. Raises ConfigError for a topic that does not exist."""

    async def receive(self, most: int, wait_s: float, gather_s: float) -> list[IncomingMessage]:
        """Wait at most `wait_s` for a message, then `gather_s` for more, and return at most `most`."""

    async def acknowledge(self, message: IncomingMessage) -> None:
        """The message is done and is not delivered again. A lost acknowledgement costs one more delivery."""

    async def keep(self, messages: Sequence[IncomingMessage]) -> None:
        """These are being worked on: they are not delivered again for now."""

    async def forget(self) -> None:
        """Drop what was delivered and not acknowledged: the next `receive` gets it again, in order."""

    async def lost_lanes(self) -> set[str]:
        """Wait until other processes have lanes that this one had, and return these."""

    async def lag(self) -> TopicLag:
        """Of the whole topic, or of the lanes of this process."""

    async def close(self) -> None:
        """Disconnect. What was not acknowledged is delivered to the next process."""


class MessageHistory(Protocol):
    """Messages of a topic, read beside all pipelines: nothing is acknowledged, and no cursor moves."""

    async def open(self) -> None:
        """Connect, waiting for the broker as long as it takes. Raises ConfigError for a topic that does not exist."""

    def read(self, wanted: MessageRange) -> AsyncIterator[IncomingMessage]:
        """Yield the messages of a range that are there now, each lane's in order. Raises BrokerUnavailable."""

    async def close(self) -> None: ...


class MessageSink(Protocol):
    """A topic to publish to. Every method raises BrokerUnavailable while the broker does not answer."""

    @property
    def max_bytes(self) -> int:
        """Of a message's body."""

    async def open(self) -> None:
        """Connect, waiting for the broker as long as it takes. Raises ConfigError for a topic that does not exist."""

    async def position(self, lane: str) -> str:
        """Return a place in the topic before everything that will be published for the lane from now on.

        From here on no other process publishes for the lane without a look at the topic, where the broker can see to
        that.
        """

    async def publish(self, message: OutgoingMessage, lane: str, position: str, *, repeated: bool) -> bool:
        """Return when the broker has stored the message; False if it had it already.

        Args:
            lane: of the message that it answers
            position: from before the first time that it was published
            repeated: it may be in the topic: an earlier call raised BrokerUnavailable, or was another process's

        Raises:
            MessageTooLarge: of this message.
        """

    async def close(self) -> None: ...
