"""How many replicas must confirm a write, so that no failover of the Sentinels can lose it: all that are up.

One of two is not enough. The Sentinels promote the replica whose offset they read as the higher one, each at its own
time and every 10 s only; and a master that hung, and goes on while they promote one replica, is still confirmed by the
other one, until a second later they have told that one, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import redis.asyncio
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

_ASK_AGAIN_S = 1.0
_TIMEOUT_S = 0.5


class ReplicasUnknown(RedisConnectionError):
    """No Sentinel has ever said which replicas there are."""


class PromotableReplicas:
    """The replicas that the Sentinels of a client take to be up, asked once a second at most.

    Args:
        client: of a master behind Sentinels, or of one server, where nothing says how many replicas there are
        clock: monotonic time, s
    """

    def __init__(self, client: redis.asyncio.Redis, *, clock: Callable[[], float] = time.monotonic) -> None:
        pool = client.connection_pool
        self._pool = pool if isinstance(pool, SentinelConnectionPool) else None
        self._clock = clock
        self._lock = asyncio.Lock()
        self._up: int | None = None
        self._fault = ""
        self._asked_at = float("-inf")

    async def required(self, at_least: int) -> int:
        """Return how many replicas must confirm a write: `at_least`, with Sentinels all that are up; 0 for none.

        Raises:
            ReplicasUnknown: no Sentinel has ever answered
        """
        if self._pool is None or not at_least:
            return at_least
        async with self._lock:
            if self._clock() - self._asked_at >= _ASK_AGAIN_S:
                await self._ask(self._pool)
                self._asked_at = self._clock()
        if self._up is None:
            raise ReplicasUnknown(f"no Sentinel says which replicas there are ({self._fault})")
        return max(at_least, self._up)

    async def _ask(self, pool: SentinelConnectionPool) -> None:
        """Keep the highest answer: a Sentinel that is cut off takes all replicas to be down. Without any, the last."""
        answers: list[int] = []

        async def ask(sentinel: redis.asyncio.Redis) -> None:
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    replicas = await sentinel.sentinel_slaves(pool.service_name)
                answers.append(sum(not replica["is_sdown"] for replica in replicas))
            except (RedisError, OSError) as error:
                self._fault = type(error).__name__

        async with asyncio.TaskGroup() as tasks:
            for sentinel in pool.sentinel_manager.sentinels:
                tasks.create_task(ask(sentinel))
        self._up = max(answers, default=self._up)
