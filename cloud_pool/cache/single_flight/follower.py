"""Reading an answer that another gateway makes."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..entry_codec import CorruptEntry, unpack_pieces
from ..metrics import CacheMetrics
from ..store import AnswerStore, RedisUnavailable, RemoteLeader, StreamEntry
from .shared_generation import SharedGeneration


class GenerationFollower:
    """One leader's answer, piece by piece into a flight."""

    def __init__(
        self,
        store: AnswerStore,
        metrics: CacheMetrics,
        generation: SharedGeneration,
        leader: RemoteLeader,
        *,
        poll_s: float,
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._flight = generation
        self._leader = leader
        self._poll_s = poll_s
        self._last = b"0"

    async def run(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Returns when the flight has landed, or when this leader will say nothing more."""
        watched_at = clock()
        try:
            while True:
                if await self._took(await self._store.read(self._leader, self._last, self._poll_s)):
                    return
                if clock() - watched_at < self._poll_s:
                    continue
                watched_at = clock()
                if not await self._store.watch(self._leader):
                    # It may have said its last between the two calls.
                    await self._took(await self._store.read(self._leader, self._last, 0.0))
                    return
        except RedisUnavailable:
            return
        except CorruptEntry:
            self._metrics.fault("corrupt")

    async def _took(self, rows: list[StreamEntry]) -> bool:
        """Whether it is over. Raises Corrupt."""
        for row in rows:
            self._last = row.at
            if row.kind not in (b"chunks", b"end"):
                return True  # failed, or look again
            head, chunks = unpack_pieces(row.data, self._flight.length)
            self._flight.head = self._flight.head or head
            for chunk in chunks:
                await self._flight.send(chunk)
            if row.kind == b"end":
                self._flight.finish()
                return True
        return False
