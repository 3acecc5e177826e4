"""The messages that a process works on: which publishes after which, and which are the same message twice."""

from __future__ import annotations

import secrets

import anyio

from ..brokers.port import IncomingMessage
from .outcome import StreamMessage


class MessageWork:
    """A message that this process works on.

    `before`: the message of the same key that publishes first. `twin`: a message with the same id: it was sent twice.
    """

    def __init__(
        self,
        message: StreamMessage,
        incoming: IncomingMessage,
        before: MessageWork | None = None,
        twin: MessageWork | None = None,
    ) -> None:
        self.message = message
        self.incoming = incoming  # the latest delivery
        self.before = before
        self.twin = twin
        self.run = secrets.token_hex(8)  # tells a repeated record from another process's
        self.position = ""  # in the topic of outcomes, before the outcome
        self.scope = anyio.CancelScope()
        self.ended = anyio.Event()
        self.published = False


class WorkTable:
    """The works in progress."""

    def __init__(self) -> None:
        self._by_position: dict[str, MessageWork] = {}
        self._by_effect: dict[str, MessageWork] = {}
        self._last_of_key: dict[str, MessageWork] = {}
        self._changed = anyio.Event()

    def __len__(self) -> int:
        return len(self._by_position)

    def all(self) -> list[MessageWork]:
        """Return those that have not ended."""
        return list(self._by_position.values())

    def deliver(self, incoming: IncomingMessage) -> bool:
        """Note a further delivery of a message. Returns False if it is not worked on."""
        work = self._by_position.get(incoming.position)
        if work is not None:
            work.incoming = incoming
        return work is not None

    def enter(self, message: StreamMessage, incoming: IncomingMessage) -> MessageWork:
        """Begin to work on a message."""
        work = MessageWork(message, incoming, self._last_of_key.get(message.key), self._by_effect.get(message.effect))
        self._by_position[incoming.position] = work
        if work.twin is None:
            self._by_effect[message.effect] = work
        if message.key:
            self._last_of_key[message.key] = work
        return work

    def leave(self, work: MessageWork) -> None:
        """The work has ended, or another process has the message now."""
        if self._by_position.get(work.incoming.position) is work:
            del self._by_position[work.incoming.position]
        if self._by_effect.get(work.message.effect) is work:
            del self._by_effect[work.message.effect]
        if self._last_of_key.get(work.message.key) is work:
            del self._last_of_key[work.message.key]
            if work.before is not None and not work.before.ended.is_set():
                self._last_of_key[work.message.key] = work.before
        self._changed.set()
        self._changed = anyio.Event()

    async def change(self) -> None:
        """Wait until a message has left."""
        await self._changed.wait()

    def clear(self) -> None:
        for held in (self._by_position, self._by_effect, self._last_of_key):
            held.clear()
