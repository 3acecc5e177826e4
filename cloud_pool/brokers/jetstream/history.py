"""Ranges of a JetStream subject, read by a consumer that ends with them: no pipeline's consumer is touched."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime

from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from ..address import BrokerLogin, MessageRange, TopicAddress
from ..port import IncomingMessage
from .connection import PAGE, TIMEOUT_S, NatsConnection, incoming, translated

_ROUNDING_S = 0.001  # the server counts nanoseconds, and the client microseconds
_KEPT_S = 60.0  # by the server, for a reader that is busy with what it has


class JetStreamHistory:
    """What is in the streams of a subject; wildcards are allowed."""

    def __init__(self, address: TopicAddress, login: BrokerLogin) -> None:
        self._connection = NatsConnection(address, login)
        self._subject = address.topic

    async def open(self) -> None:
        """Connect. Raises ConfigError if no stream has the subject."""
        self._context = await self._connection.open()
        self._stream = await self._connection.stream_name(self._context)

    async def read(self, wanted: MessageRange) -> AsyncIterator[IncomingMessage]:
        """Yield the messages that are there now. Raises BrokerUnavailable."""
        config = ConsumerConfig(ack_policy=AckPolicy.NONE, inactive_threshold=_KEPT_S)
        if wanted.since:
            config.deliver_policy = DeliverPolicy.BY_START_TIME
            config.opt_start_time = datetime.fromtimestamp(wanted.since - _ROUNDING_S, UTC)
        elif wanted.first > 1:
            config.deliver_policy = DeliverPolicy.BY_START_SEQUENCE
            config.opt_start_seq = wanted.first
        async with translated():
            subscription = await self._context.pull_subscribe(self._subject, stream=self._stream, config=config)
            left = (await subscription.consumer_info()).num_pending or 0
        while left > 0:
            async with translated():
                fetched = await subscription.fetch(min(left, PAGE), timeout=TIMEOUT_S)
            left -= len(fetched)
            for message in map(incoming, fetched):
                if wanted.last is not None and int(message.position) > wanted.last:
                    left = 0
                elif wanted.holds(message.lane, int(message.position), message.published_at):
                    yield message
        async with translated():
            await subscription.unsubscribe()

    async def close(self) -> None:
        """Disconnect."""
        await self._connection.close()
