"""How many requests of a tier are in Triton at once, and who waits here: bounded, by urgency and then by age.

The queue is ours and not Triton's, whose queue timeouts fire late and whose limits stall a single instance.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

import anyio

from router.errors import DeadlineExceeded, QueueFull

Priority = Literal["interactive", "standard", "bulk"]
RANK: dict[Priority, int] = {"interactive": 0, "standard": 1, "bulk": 2}
RETRY_S = 1.0


class Admission:
    """The places of one tier. Owns `running` and the queue."""

    def __init__(self, places: int, queue: int) -> None:
        self._places = places
        self._queue = queue
        self._order = itertools.count()
        self._waiters: list[tuple[int, int, asyncio.Future[None]]] = []
        self.running = 0

    @property
    def waiting(self) -> int:
        return sum(not waiter.done() for _, _, waiter in self._waiters)

    @asynccontextmanager
    async def place(self, priority: Priority, left_s: float) -> AsyncIterator[None]:
        """Raises QueueFull at once, or DeadlineExceeded when no place came free in `left_s`."""
        if self.running < self._places:
            self.running += 1
        else:
            await self._wait(priority, left_s)
        try:
            yield
        finally:
            self._leave()

    async def _wait(self, priority: Priority, left_s: float) -> None:
        if self.waiting >= self._queue:
            raise QueueFull(
                f"{self.running} requests run and {self.waiting} wait: the tier is full", retry_after_s=RETRY_S
            )
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiters, (RANK[priority], next(self._order), waiter))
        try:
            with anyio.fail_after(left_s):
                await waiter
        except TimeoutError:
            self._give_up(waiter)
            raise DeadlineExceeded("the time for this request ended in the queue") from None
        except asyncio.CancelledError:
            self._give_up(waiter)
            raise

    def _give_up(self, waiter: asyncio.Future[None]) -> None:
        # A place may have been given in the very moment that the waiter left: pass it on.
        if waiter.done() and not waiter.cancelled():
            self._leave()
        waiter.cancel()

    def _leave(self) -> None:
        """The place goes to the next waiter, or is free."""
        while self._waiters:
            _, _, waiter = heapq.heappop(self._waiters)
            if not waiter.done():
                waiter.set_result(None)
                return
        self.running -= 1
