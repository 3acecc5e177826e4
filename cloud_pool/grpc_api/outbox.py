"""Messages on their way to one client: a short queue in front of gRPC's flow control.

While a client does not read, gRPC keeps one write waiting, and takes no status before it. So the writer outlives the
answer: what produces that is told soon that the client is gone, and the call ends when the last write has.

A write costs as much as ten tokens of a stream over HTTP, so texts that come while one is under way leave together.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from grpc import aio

from router.errors import ClientGone

_MOST_WAITING = 8
_MOST_CHARACTERS = 1024  # of texts that leave together
_TEXT = {"index", "text"}


class Outbox:
    """Owns the writes of one call.

    Args:
        call: gRPC's context of the call.
        stalled_s: a client that takes no message for so long counts as gone.
    """

    def __init__(self, call: Any, stalled_s: float) -> None:
        self._call = call
        self._stalled_s = stalled_s
        self._waiting: deque[Any] = deque()
        self._added, self._taken = asyncio.Event(), asyncio.Event()
        self._closed = False
        self._broken = False

    async def run(self) -> None:
        """Write what is put; return after `close`, when all is written or the client has left."""
        try:
            while True:
                while self._waiting:
                    await self._call.write(self._waiting[0])
                    self._waiting.popleft()
                    self._taken.set()
                if self._closed:
                    return
                self._added.clear()
                await self._added.wait()
        except aio.BaseError:
            self._broken = True
            self._taken.set()

    async def put(self, message: Any) -> None:
        """Add a message; waits while the client is behind. Raises ClientGone."""
        # The first one may be under way.
        if len(self._waiting) < 2 or not _joined(self._waiting[-1], message):
            self._waiting.append(message)
        self._added.set()
        await self._until(lambda: len(self._waiting) < _MOST_WAITING)

    async def flush(self) -> None:
        """Wait until gRPC has taken every message. Raises ClientGone."""
        await self._until(lambda: not self._waiting)

    def close(self) -> None:
        """Let `run` end after what was put."""
        self._closed = True
        self._added.set()

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds() or self._broken:
            if self._broken:
                raise ClientGone("the client has left")
            self._taken.clear()
            try:
                async with asyncio.timeout(self._stalled_s):
                    await self._taken.wait()
            except TimeoutError:
                raise ClientGone("the client reads nothing any more") from None


def _joined(before: Any, after: Any) -> bool:
    """Append a Delta to the one before it, if both are texts of one choice."""
    first, second = before.delta, after.delta
    if not _fields(before) == {"delta"} == _fields(after) or first.index != second.index:
        return False
    if _fields(first) - _TEXT or _fields(second) - _TEXT or len(first.text) > _MOST_CHARACTERS:
        return False
    first.text += second.text
    return True


def _fields(message: Any) -> set[str]:
    return {field.name for field, _ in message.ListFields()}
