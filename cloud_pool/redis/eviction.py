"""Whether a Redis forgets keys by itself: one that evicts loses budgets, usage and revocations without an error."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

import anyio
import redis.asyncio
from redis.exceptions import NoPermissionError, RedisError

from .faults import address_of

_CHECK_AGAIN_S: Final = 30.0  # the setting can be changed while Redis runs, and another Redis may take its place
_ANSWER_S: Final = 5.0
_log = logging.getLogger("causeway.cloud.redis")


async def eviction_fault(client: redis.asyncio.Redis) -> str:
    """Return why a Redis may forget keys, and what to do; "" if it does not. Of a cluster all primaries are asked.

    INFO says it, which managed services allow where they refuse CONFIG.

    Raises:
        RedisError: Redis does not answer
    """
    name = f"Redis at {address_of(client)}" if address_of(client) else "Redis"
    try:
        nodes = await _memory(client)
    except NoPermissionError:
        return f"{name} does not say whether it evicts keys: allow INFO to its user."
    policies = sorted({str(node["maxmemory_policy"]) for node in nodes if _evicts(node)})
    if not policies:
        return ""
    return (
        f"{name} evicts keys when its memory is full (maxmemory-policy {', '.join(policies)}), and with them tenants' "
        "budgets, usage and revocations. Set maxmemory-policy to noeviction."
    )


class EvictionCheck:
    """Asks a Redis at the start and every 30 s. `fault` is what `eviction_fault` found last.

    Args:
        client: None: no Redis, no fault
    """

    def __init__(self, client: redis.asyncio.Redis | None) -> None:
        self._redis = client
        self.fault = ""

    async def watch(self) -> None:
        """Check until cancelled."""
        while self._redis is not None:
            await self.check()
            await anyio.sleep(_CHECK_AGAIN_S)

    async def check(self) -> None:
        """Check once, and log what has changed. A Redis that does not answer changes nothing."""
        if self._redis is None:
            return
        try:
            with anyio.fail_after(_ANSWER_S):
                fault = await eviction_fault(self._redis)
        except (RedisError, OSError, TimeoutError):
            return  # Others report that.
        if fault and fault != self.fault:
            _log.error(fault)
        elif self.fault and not fault:
            _log.info("Redis evicts no keys any more")
        self.fault = fault


async def _memory(client: redis.asyncio.Redis) -> tuple[Mapping[str, Any], ...]:
    opened: object = client  # of a cluster it is a RedisCluster, which has the same methods
    if not isinstance(opened, redis.asyncio.RedisCluster):
        return (await client.info("memory"),)
    nodes = await opened.info("memory", target_nodes=redis.asyncio.RedisCluster.PRIMARIES)
    return tuple(nodes.values()) if "maxmemory_policy" not in nodes else (nodes,)


def _evicts(memory: Mapping[str, Any]) -> bool:
    return bool(memory["maxmemory"]) and memory["maxmemory_policy"] != "noeviction"
