"""Reads an answer that another gateway generates."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..entry_codec import CorruptEntry, unpack_batch
from ..store import AnswerStore, CacheMetrics, RedisUnavailable, RemoteLeader, StreamEntry
from .shared_generation import CoalescedGeneration


class GenerationFollower:
    """Copies one remote leader's chunks into the local generation."""

    def __init__(
        self,
        store: AnswerStore,
        metrics: CacheMetrics,
        generation: CoalescedGeneration,
        leader: RemoteLeader,
        *,
        poll_s: float,
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._generation = generation
        self._leader = leader
        self._poll_s = poll_s
        self._last = b"0"

    async def run(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Return when the generation is finished, or when this leader will publish nothing more."""
        announced_at = clock()
        try:
            while True:
                if await self._consume(await self._store.read(self._leader, self._last, self._poll_s)):
                    return
                if clock() - announced_at < self._poll_s:
                    continue
                announced_at = clock()
                if not await self._store.announce_interest(self._leader):
                    # Its last entries may have come between the two calls.
                    await self._consume(await self._store.read(self._leader, self._last, 0.0))
                    return
        except RedisUnavailable:
            return
        except CorruptEntry:
            self._metrics.fault("corrupt")

    async def _consume(self, entries: list[StreamEntry]) -> bool:
        """Return whether the leader has ended. Raises CorruptEntry."""
        for entry in entries:
            self._last = entry.id
            if entry.kind not in (b"chunks", b"end"):
                return True  # failed, or wake: look the answer up again
            head, chunks = unpack_batch(entry.data, self._generation.length)
            self._generation.head = self._generation.head or head
            for chunk in chunks:
                await self._generation.send(chunk)
            if entry.kind == b"end":
                self._generation.finish()
                return True
        return False
