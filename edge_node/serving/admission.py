"""Admission control: a rate limit per client, and a bounded queue in front of bounded concurrency.

The rate limit applies before the cache lookup. A permit (concurrency) is needed only for a generation: a cache hit does
not queue behind the work that it saves. A permit is released however its request ends.

Clients that wait take turns, each with its own requests in their order. In a full queue the youngest request of the
client with the most waiting makes room for that of another client: a flood queues behind itself.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio
import msgspec

from router.errors import DeadlineExceeded, Draining, QueueFull, RateLimited
from router.trackers import MAX_CLIENTS, network_of

_SMOOTHING = 0.2  # weight of the newest duration in the moving average
_MAX_RETRY_S = 60.0


class AdmissionLimits(msgspec.Struct, frozen=True):
    concurrent: int = 16
    queue: int = 64
    per_client_rps: float | None = None  # None: no limit


class AdmissionStats(msgspec.Struct, frozen=True):
    running: int
    waiting: int
    clients: int


class Admission:
    """Owns all permits, the queue and the rate-limit buckets. Times are the loop's clock, in seconds.

    Attributes:
        draining: new requests are refused.
        ending: a request that is cancelled now is cancelled by the daemon, not by its client.
    """

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # by client: tokens, and as of when
        self._queues: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # by client, the next turn first
        self._waiting = 0
        self._running = 0
        self._spare: set[anyio.CancelScope] = set()
        self._idle: list[asyncio.Future[None]] = []
        self._average_held_s = 1.0
        self.draining = False
        self.ending = False

    def set_limits(self, limits: AdmissionLimits) -> None:
        """Apply new limits. Running requests continue; queued ones start where there is room now."""
        self._limits = limits
        self._start_waiting()

    def drain(self) -> None:
        """Refuse new requests; running and queued ones finish."""
        self.draining = True

    def end(self) -> None:
        """Refuse new requests; those in progress are about to be cancelled."""
        self.draining = self.ending = True

    def stats(self) -> AdmissionStats:
        return AdmissionStats(self._running, self._waiting, len(self._buckets))

    # --- rate --------------------------------------------------------------------------------------------------------

    def admit(self, client: str, now: float) -> None:
        """Charge one request to `client`.

        Raises:
            RateLimited: with the time until the next token.
            Draining: this server is shutting down.
        """
        if self.draining:
            raise Draining("this server is shutting down", retry_after_s=1.0)
        rate = self._limits.per_client_rps
        if rate is None:
            return
        burst = max(1.0, rate)
        client = network_of(client)
        tokens, at = self._buckets.pop(client, (burst, now))
        tokens = min(burst, tokens + max(0.0, now - at) * rate)
        if len(self._buckets) >= MAX_CLIENTS:
            self._buckets.popitem(last=False)
        self._buckets[client] = (tokens - 1.0 if tokens >= 1.0 else tokens, now)
        if tokens < 1.0:
            wait_s = (1.0 - tokens) / rate if rate > 0.0 else _MAX_RETRY_S
            raise RateLimited(f"more than {rate:g} requests per second", retry_after_s=wait_s)

    # --- permits -----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def permit(self, deadline: float, client: str = "") -> AsyncIterator[None]:
        """Hold one permit: the right to run one generation. See `acquire`."""
        await self.acquire(deadline, client)
        started = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            self.release(asyncio.get_running_loop().time() - started)

    async def acquire(self, deadline: float, client: str = "") -> None:
        """Wait for a permit until `deadline`.

        Raises:
            QueueFull: at once, or when another client's request took its place; with an estimate of when to retry.
            DeadlineExceeded: while queued.
        """
        for scope in self._spare:
            scope.cancel()
        if self._running < self._limits.concurrent and not self._waiting:
            self._running += 1
            return
        client = network_of(client)
        if self._waiting >= self._limits.queue and not self._displace_for(client):
            raise self._full()
        await self._wait(deadline, client)

    def release(self, held_s: float) -> None:
        """Release a permit that was held for `held_s` seconds."""
        self._average_held_s += _SMOOTHING * (held_s - self._average_held_s)
        self._release()

    async def _wait(self, deadline: float, client: str) -> None:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        timer = loop.call_at(deadline, _expire, turn)
        self._queues.setdefault(client, deque()).append(turn)
        self._waiting += 1
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._release()  # granted in the same step as the cancellation
            elif turn in self._queues.get(client, ()):
                self._queues[client].remove(turn)
                self._forget_turn(client)
            raise
        finally:
            timer.cancel()

    def _displace_for(self, client: str) -> bool:
        """Let the youngest request of the client with the most waiting make room, if another client has more."""
        if not self._queues:
            return False
        most = max(self._queues, key=lambda name: len(self._queues[name]))
        if len(self._queues[most]) <= len(self._queues.get(client, ())) + 1:
            return False
        turn = self._queues[most].pop()
        self._forget_turn(most)
        if not turn.done():
            turn.set_exception(self._full())
        return True

    def _forget_turn(self, client: str) -> None:
        self._waiting -= 1
        if not self._queues[client]:
            del self._queues[client]

    def _full(self) -> QueueFull:
        full = f"{self._running} requests running and {self._waiting} queued"
        return QueueFull(full, retry_after_s=self._retry_after_s())

    # --- work in idle time -----------------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether a request could start now."""
        return self._running < self._limits.concurrent and not self._waiting

    async def idle(self) -> None:
        """Wait until no request runs or waits."""
        while self._running or self._waiting:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle.append(turn)
            await turn

    @contextmanager
    def spare(self) -> Iterator[None]:
        """Work that needs no permit, and is cancelled as soon as a request wants one."""
        with anyio.CancelScope() as scope:
            self._spare.add(scope)
            try:
                yield
            finally:
                self._spare.discard(scope)

    def _release(self) -> None:
        self._running -= 1
        self._start_waiting()
        if self._idle and not self._running:
            turns, self._idle = self._idle, []
            for turn in turns:
                if not turn.done():
                    turn.set_result(None)

    def _start_waiting(self) -> None:
        while self._waiting and self._running < self._limits.concurrent:
            client = next(iter(self._queues))
            turn = self._queues[client].popleft()
            self._queues.move_to_end(client)
            self._forget_turn(client)
            if not turn.done():
                self._running += 1
                turn.set_result(None)

    def _retry_after_s(self) -> float:
        """The queue advances by one request every (average duration / concurrency) seconds."""
        return min(_MAX_RETRY_S, max(1.0, self._average_held_s / max(1, self._limits.concurrent)))


def _expire(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_exception(DeadlineExceeded("the deadline passed while the request was queued"))
