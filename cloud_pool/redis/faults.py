"""What is wrong with a Redis, for operators: the service, its address without a password, and what to do.

One that forgets keys by itself is found before it matters: it would lose budgets, usage and revocations without an
error.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Mapping
from typing import Any, Final
from weakref import WeakKeyDictionary

import anyio
import redis.asyncio
from redis.asyncio.sentinel import MasterNotFoundError
from redis.exceptions import AuthenticationError, BusyLoadingError, NoPermissionError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

_TO_DO = "Start it, or correct its address (`redis` in the configuration, or --redis)."
_WRONG_DATA = ("WRONGTYPE", "is not an integer", "is not a valid float", "would overflow", "arithmetic on", "with nil")
_addresses: WeakKeyDictionary[redis.asyncio.Redis, str] = WeakKeyDictionary()
_CHECK_AGAIN_S: Final = 30.0  # the setting can be changed while Redis runs, and another Redis may take its place
_ANSWER_S: Final = 5.0
_log = logging.getLogger("causeway.cloud.redis")


def remember_address(client: redis.asyncio.Redis, address: str) -> None:
    """Note the address that messages about a client's faults name. `address`: without a password."""
    _addresses[client] = address


def address_of(client: redis.asyncio.Redis) -> str:
    """Return a client's address without a password; "" if it is not known."""
    return _addresses.get(client, "")


def client_fault(error: Exception, client: redis.asyncio.Redis | None) -> str:
    """Describe what a call of `client` raised, as `redis_fault`."""
    return redis_fault(error, "" if client is None else address_of(client))


def redis_fault(error: Exception, address: str) -> str:
    """Describe what a call of Redis raised.

    Args:
        error: a RedisError, an OSError or a TimeoutError; Redis's own words may be in the text.
        address: without a password; "" if it is not known.
    """
    name = f"Redis at {address}" if address else "Redis"
    if isinstance(error, BusyLoadingError):
        return f"{name} is still loading its data: {error}"
    if isinstance(error, AuthenticationError):
        return f"{name} refuses the login: {error}. Correct the user and the password in the configuration."
    if isinstance(error, MasterNotFoundError):
        return f"{name}: the Sentinels name no master: {error}. {_TO_DO}"
    if isinstance(error, RedisTimeoutError | TimeoutError):
        return f"{name} does not answer in time. Look whether it is overloaded, stopped or cut off."
    if isinstance(error, RedisConnectionError | OSError):
        return f"{name} cannot be reached: {_reason(error)}. {_TO_DO}"
    return f"{name} answers with an error: {str(error) or type(error).__name__}"


def is_wrong_data(error: BaseException | None) -> bool:
    """Whether a command failed for what is stored in its keys, so that it fails again, and only there."""
    return isinstance(error, ResponseError) and any(text in str(error) for text in _WRONG_DATA)


def is_unreachable(error: BaseException | None) -> bool:
    """Whether Redis did not answer at all; False if it answered with an error."""
    return isinstance(error, RedisConnectionError | RedisTimeoutError | OSError)


def _reason(error: Exception) -> str:
    """The operating system's words, instead of redis-py's, which name a number and the host once more."""
    for one in _causes(error):
        if isinstance(one, socket.gaierror):
            return "its host name is not known"
        if isinstance(one, OSError) and one.errno and not isinstance(one, RedisError):
            return os.strerror(one.errno).lower() if one.errno > 0 else str(one)
    return (str(error) or type(error).__name__).rstrip(".")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


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
