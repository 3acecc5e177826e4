"""Who may start work now: a rate per client, a bounded number at work, a bounded queue in front of them.

Requests are admitted (rate) before the cache is asked and get a slot (concurrency) only for work that a target does: a
hit does not wait behind the work that it saves. A slot is given back whatever happens to its holder.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import OrderedDict, deque
from functools import lru_cache

import msgspec

from router.errors import DeadlineExceeded, Draining, QueueFull, RateLimited

_CLIENTS = 4096  # the buckets that are remembered; who was quiet longest is forgotten first
_RECENT = 0.2  # weight of the newest piece of work in the mean
_MAX_RETRY_S = 60.0


class AdmissionLimits(msgspec.Struct, frozen=True):
    concurrent: int = 16
    queue: int = 64
    per_client_rps: float | None = None


class AdmissionStats(msgspec.Struct, frozen=True):
    working: int
    waiting: int
    clients: int


class _Bucket:
    __slots__ = ("at", "tokens")

    def __init__(self, tokens: float, at: float) -> None:
        self.tokens = tokens
        self.at = at


@lru_cache(_CLIENTS)
def network_of(client: str) -> str:
    """Whose rate it is: of an IPv6 address its /64, which is one customer's (RFC 6177); of a mapped one the IPv4
    address; of any other client the name itself.
    """
    try:
        address = ipaddress.IPv6Address(client)
    except ValueError:
        return client
    return str(address.ipv4_mapped or ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))


class Admission:
    """One owner of all slots, queues and buckets. `now` is the loop's clock, in seconds."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._working = 0
        self._work_s = 1.0  # running mean of how long a slot is held
        self._draining = False

    def set_limits(self, limits: AdmissionLimits) -> None:
        """From now on. Those at work stay; those who fit now start."""
        self._limits = limits
        self._start_waiting()

    def drain(self) -> None:
        """Nobody new from now on; those at work or waiting finish."""
        self._draining = True

    def stats(self) -> AdmissionStats:
        return AdmissionStats(self._working, len(self._waiting), len(self._buckets))

    # --- rate --------------------------------------------------------------------------------------------------------

    def admit(self, client: str, now: float) -> None:
        """Raises RateLimited or Draining, with the time after which it is worth asking again."""
        if self._draining:
            raise Draining("this server is shutting down", retry_after_s=1.0)
        rate = self._limits.per_client_rps
        if rate is None:
            return
        burst = max(1.0, rate)
        bucket = self._bucket(network_of(client), burst, now)
        bucket.tokens = min(burst, bucket.tokens + max(0.0, now - bucket.at) * rate)
        bucket.at = now
        if bucket.tokens < 1.0:
            wait_s = (1.0 - bucket.tokens) / rate if rate > 0.0 else _MAX_RETRY_S
            raise RateLimited(f"more than {rate:g} requests per second", retry_after_s=wait_s)
        bucket.tokens -= 1.0

    def _bucket(self, client: str, burst: float, now: float) -> _Bucket:
        bucket = self._buckets.get(client)
        if bucket is None:
            if len(self._buckets) >= _CLIENTS:
                self._buckets.popitem(last=False)
            bucket = self._buckets[client] = _Bucket(burst, now)
        else:
            self._buckets.move_to_end(client)
        return bucket

    # --- slots -------------------------------------------------------------------------------------------------------

    def slot(self, deadline: float) -> Slot:
        """Work inside. Entering raises QueueFull (at once) or DeadlineExceeded (while waiting)."""
        return Slot(self, deadline)

    def give_back(self, held_s: float) -> None:
        self._work_s += _RECENT * (held_s - self._work_s)
        self._give_back()

    async def take(self, deadline: float) -> None:
        if self._working < self._limits.concurrent and not self._waiting:
            self._working += 1
            return
        if len(self._waiting) >= self._limits.queue:
            full = f"{self._working} requests at work and {len(self._waiting)} waiting"
            raise QueueFull(full, retry_after_s=self._retry_after_s())
        await self._wait(deadline)

    async def _wait(self, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        timer = loop.call_at(deadline, _expire, turn)
        self._waiting.append(turn)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._give_back()  # The turn came, but whoever waited was cancelled in the same step.
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise
        finally:
            timer.cancel()

    def _give_back(self) -> None:
        self._working -= 1
        self._start_waiting()

    def _start_waiting(self) -> None:
        while self._waiting and self._working < self._limits.concurrent:
            turn = self._waiting.popleft()
            if not turn.done():
                self._working += 1
                turn.set_result(None)

    def _retry_after_s(self) -> float:
        """When a place in the queue is likely to be free: one piece of work is done every mean / concurrent seconds."""
        return min(_MAX_RETRY_S, max(1.0, self._work_s / max(1, self._limits.concurrent)))


class Slot:
    """One place at work, for the time of an `async with`."""

    __slots__ = ("_admission", "_deadline", "_started")

    def __init__(self, admission: Admission, deadline: float) -> None:
        self._admission = admission
        self._deadline = deadline
        self._started = 0.0

    async def __aenter__(self) -> None:
        await self._admission.take(self._deadline)
        self._started = asyncio.get_running_loop().time()

    async def __aexit__(self, *_: object) -> None:
        self._admission.give_back(asyncio.get_running_loop().time() - self._started)


def _expire(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_exception(DeadlineExceeded("the deadline passed while the request waited for its turn"))
