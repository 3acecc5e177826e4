"""A subject of JetStream to publish to.

Messages carry `Nats-Msg-Id`: a stream drops a second one within its duplicate window (2 minutes, unless configured).
"""

from __future__ import annotations

from collections.abc import Iterable

import anyio
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from router.errors import ConfigError

from ..address import BrokerLogin, TopicAddress
from ..port import BrokerUnavailable, OutgoingMessage
from .connection import PAGE, RECONNECT_S, TIMEOUT_S, NatsConnection, translated

MESSAGE_ID = "Nats-Msg-Id"
_CONTENT_TYPE = "Content-Type"


class JetStreamSink:
    """A subject to publish to."""

    def __init__(self, address: TopicAddress, login: BrokerLogin) -> None:
        """Raises ConfigError for a wildcard."""
        if any(part in ("*", ">") for part in address.topic.split(".")):
            raise ConfigError("a topic to publish to has no wildcards", where=str(address))
        self._connection = NatsConnection(address, login)
        self._subject = address.topic
        self._last = 0  # sequence in the stream

    @property
    def max_bytes(self) -> int:
        """NATS's `max_payload`."""
        return self._connection.client.max_payload

    async def open(self) -> None:
        """Connect. Raises ConfigError if no stream has the subject."""
        self._context = await self._connection.open()
        self._stream = await self._connection.stream_name(self._context)
        while True:
            try:
                async with translated():
                    self._last = (await self._context.stream_info(self._stream)).state.last_seq
                return
            except BrokerUnavailable:
                await anyio.sleep(RECONNECT_S)

    async def position(self, lane: str) -> str:
        """Return the last sequence that this process knows of."""
        return str(self._last)

    async def publish(self, message: OutgoingMessage, lane: str, position: str, *, repeated: bool) -> bool:
        """Return when the stream has the message. Raises BrokerUnavailable or MessageTooLarge."""
        headers = {MESSAGE_ID: message.id, _CONTENT_TYPE: message.content_type}
        async with translated():
            if repeated and message.id in await self._ids(int(position)):
                return False
            stored = await self._context.publish(self._subject, message.body, TIMEOUT_S, self._stream, headers)
        self._last = max(self._last, stored.seq)
        return True

    async def _ids(self, after: int) -> Iterable[str]:
        config = ConsumerConfig(
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=after + 1,
            ack_policy=AckPolicy.NONE,
            headers_only=True,
            inactive_threshold=TIMEOUT_S,
        )
        subscription = await self._context.pull_subscribe(self._subject, stream=self._stream, config=config)
        left, ids = (await subscription.consumer_info()).num_pending or 0, list[str]()
        while left > 0:
            fetched = await subscription.fetch(min(left, PAGE), timeout=TIMEOUT_S)
            left -= len(fetched)
            ids += [(message.headers or {}).get(MESSAGE_ID, "") for message in fetched]
        await subscription.unsubscribe()
        return ids

    async def close(self) -> None:
        """Disconnect."""
        await self._connection.close()
