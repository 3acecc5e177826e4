"""The Redis client of jobs: it runs commands and scripts, returns plain replies and translates errors."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TypeVar, cast

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.backoff import ExponentialWithJitterBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import (
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from causeway_server.router.errors import JobStoreUnavailable, RecordUnreadable

from ..redis.config import shown_address
from ..redis.connect import ConnectionOptions, is_unreachable, open_redis, redis_fault
from ..redis.keys import JOBS_LAYOUT, layout_fault
from .config import JobsConfig

_ASK_AGAIN_S = 1.0
_ASK_TIMEOUT_S = 0.5
Reply = bytes | int | None | list["Reply"]
Argument = bytes | str | int | float
_RETRIES = 3
_TIMEOUT_S = 5.0
_MAX_CONNECTIONS = 512  # a client that follows events holds one
_LAYOUT_ERROR = "LAYOUT"  # of lua/common.lua
_WHAT = "The jobs"
log = logging.getLogger(__name__)
T = TypeVar("T")


class JobStoreRefused(JobStoreUnavailable):
    """Redis answered with an error: it cannot write, or it forbids the command."""


class JobStoreLayoutMismatch(JobStoreUnavailable, code="job_store_layout", retryable=False):
    """The keys in Redis have the layout of another Causeway version, so nothing is read or changed."""


class JobStoreNotReplicated(JobStoreUnavailable, code="job_store_not_replicated"):
    """Too few replicas of Redis have confirmed accepted data, so a failover could lose it."""


class ReplicasUnknown(RedisConnectionError):
    """The replicas are unknown, because no Sentinel has reported them so far."""


class PromotableReplicas:
    """The number of replicas that the Sentinels consider up, queried at most once a second; of a single server unknown.

    All of them must confirm a write, so that no failover can lose it; one of two would not be enough. Each Sentinel
    reads the replicas' offsets only every 10 s, and promotes the one with the higher offset then. A master that hung
    and continues during a promotion still gets confirmations from the other replica, until it is reconfigured a second
    later.
    """

    def __init__(self, client: redis.asyncio.Redis) -> None:
        pool = client.connection_pool
        self._pool = pool if isinstance(pool, SentinelConnectionPool) else None
        self._lock = asyncio.Lock()
        self._up: int | None = None
        self._fault = ""
        self._asked_at = float("-inf")

    async def required(self, at_least: int) -> int:
        """Return how many replicas must confirm a write: `at_least`, with Sentinels all. Raises ReplicasUnknown."""
        if self._pool is None or not at_least:
            return at_least
        async with self._lock:
            if time.monotonic() - self._asked_at >= _ASK_AGAIN_S:
                await self._ask(self._pool)
                self._asked_at = time.monotonic()
        if self._up is None:
            raise ReplicasUnknown(f"No Sentinel reports how many replicas there are ({self._fault}).")
        return max(at_least, self._up)

    async def _ask(self, pool: SentinelConnectionPool) -> None:
        """Store the highest answer, or keep the last: an isolated Sentinel sees all replicas as down."""
        answers: list[int] = []

        async def ask(sentinel: redis.asyncio.Redis) -> None:
            try:
                async with asyncio.timeout(_ASK_TIMEOUT_S):
                    replicas = await sentinel.sentinel_slaves(pool.service_name)
                answers.append(sum(not replica["is_sdown"] for replica in replicas))
            except (RedisError, OSError) as error:
                self._fault = type(error).__name__

        async with asyncio.TaskGroup() as tasks:
            for sentinel in pool.sentinel_manager.sentinels:
                tasks.create_task(ask(sentinel))
        self._up = max(answers, default=self._up)


@dataclass(eq=False, repr=False)
class RedisClient:
    """Runs commands and scripts, and repeats them when the connection breaks, which is safe for all of them."""

    config: JobsConfig  # names the server (not a cluster) and the prefix of all keys, which is KEYS[1] of each script
    scripts: Mapping[str, str]  # Lua sources by name
    _: KW_ONLY
    replicated: frozenset[str] = frozenset()  # names of scripts whose effect the replicas of `config` must confirm
    clock: Callable[[], float] | None = None  # replacement for Redis's clock in tests, Unix seconds

    def __post_init__(self) -> None:
        """Create the client. Raises ConfigError for an invalid address."""
        retry = Retry(ExponentialWithJitterBackoff(base=0.02, cap=0.25), _RETRIES)
        options = ConnectionOptions(
            connections=_MAX_CONNECTIONS, connect_timeout_s=_TIMEOUT_S, timeout_s=_TIMEOUT_S, retry=retry, raw=True
        )
        self._redis = open_redis(self.config.redis, "jobs.redis", options)
        self._address = shown_address(self.config.redis)
        self.prefix = self.config.key_prefix
        self._scripts = {name: self._redis.register_script(text) for name, text in self.scripts.items()}
        self._replicas = PromotableReplicas(self._redis)

    def key(self, *parts: str) -> str:
        """Return a key below the prefix."""
        return ":".join((self.prefix, *parts))

    def explain(self, error: JobStoreUnavailable) -> str:
        """Return the error for operators, with Redis's address, which callers do not get."""
        if is_unreachable(error.__cause__) and not isinstance(error.__cause__, ReplicasUnknown):
            assert isinstance(error.__cause__, Exception)
            return redis_fault(error.__cause__, self._address)
        return f"Redis at {self._address}: {error.message}"

    async def command(self, *arguments: Argument) -> Reply:
        """Run a command. Raises JobStoreUnavailable."""
        try:
            return cast("Reply", await self._redis.execute_command(*arguments))  # type: ignore[no-untyped-call]
        except (RedisError, OSError) as error:
            raise _translate(error) from error

    async def run(self, script: str, *arguments: Argument) -> Reply:
        """Run a script by its name. A script in `replicated` returns when enough replicas have its writes.

        Raises JobStoreNotReplicated, although the script has run, or JobStoreUnavailable.
        """
        try:
            if script in self.replicated and self.config.replicas_to_wait_for:
                return await self._run_replicated(self._scripts[script], arguments)
            return cast("Reply", await self._scripts[script](keys=[self.prefix], args=list(arguments)))
        except (RedisError, OSError) as error:
            raise _translate(error) from error

    async def replicate(self) -> None:
        """Wait until enough replicas have everything written so far. Raises JobStoreUnavailable."""
        if not self.config.replicas_to_wait_for:
            return
        try:
            await self._wait_for_replicas(())
        except (RedisError, OSError) as error:
            raise _translate(error) from error

    async def _run_replicated(self, script: AsyncScript, arguments: tuple[Argument, ...]) -> Reply:
        command = ("EVALSHA", script.sha, 1, self.prefix, *arguments)
        try:
            return await self._wait_for_replicas(command)
        except NoScriptError:
            await self._redis.script_load(script.script)
            return await self._wait_for_replicas(command)

    async def _wait_for_replicas(self, command: tuple[Argument, ...]) -> Reply:
        """Run a command and wait on the same connection, whose writes alone WAIT covers.

        A repeated call may write nothing, so that WAIT would not wait for earlier writes: a small write precedes it.
        """
        required = await self._replicas.required(self.config.replicas_to_wait_for)
        pipeline = self._redis.pipeline(transaction=False)
        if command:
            pipeline.execute_command(*command)
        pipeline.execute_command("SET", self.key("replicated"), "")
        pipeline.execute_command("WAIT", required, int(self.config.replica_timeout_s * 1000))
        replies = await pipeline.execute(raise_on_error=False)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        confirmed = as_int(replies[-1])
        if confirmed < required:
            raise JobStoreNotReplicated(
                f"Only {confirmed} of {required} replicas confirmed the write in {self.config.replica_timeout_s:g} s, "
                "but the request may have been accepted. Send the request again with the same Idempotency-Key.",
                retry_after_s=2.0,
            )
        return cast("Reply", replies[0])

    async def commands(self, commands: Sequence[Sequence[Argument]]) -> list[Reply]:
        """Run commands in one round trip. Raises JobStoreUnavailable."""
        pipeline = self._redis.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        try:
            return cast("list[Reply]", await pipeline.execute()) if commands else []
        except (RedisError, OSError) as error:
            raise _translate(error) from error

    @property
    def time(self) -> int:
        """Return the time argument of scripts, in Unix milliseconds; negative to let them ask Redis."""
        return -1 if self.clock is None else int(self.clock() * 1000)

    async def now_ms(self) -> int:
        """Return the time of all stores, which is Redis's Unix time. Raises JobStoreUnavailable."""
        if self.clock is not None:
            return self.time
        seconds, micros = as_list(await self.command("TIME"))
        return as_int(seconds) * 1000 + as_int(micros) // 1000

    async def ensure_layout(self) -> None:
        """Mark an empty Redis with this version's layout. Raises JobStoreLayoutMismatch for another layout."""
        stored = as_text(await self.command("GET", self.key("layout")))
        if not stored:  # only then a write, which a full Redis refuses
            stored = as_text(await self.command("SET", self.key("layout"), JOBS_LAYOUT, "NX", "GET"))
        if layout_fault(stored, JOBS_LAYOUT, _WHAT):
            raise _layout_mismatch(stored)

    async def close(self) -> None:
        await self._redis.aclose()


def _translate(error: Exception) -> JobStoreUnavailable:
    # Redis's message may quote arguments, and those hold prompts: keep only its first word, the error code.
    if isinstance(error, ResponseError):
        code, _, rest = str(error).partition(" ")
        if code == _LAYOUT_ERROR:
            return _layout_mismatch(rest.partition(" ")[0])
        return JobStoreRefused(f"The job store refused the command: {_reason(error, code)}.", retry_after_s=2.0)
    if isinstance(error, ReplicasUnknown):
        return JobStoreUnavailable(f"Jobs wait for the Sentinels: {error}", retry_after_s=2.0)
    return JobStoreUnavailable(f"The job store does not answer ({type(error).__name__}).", retry_after_s=2.0)


def _reason(error: ResponseError, code: str) -> str:
    # Of some errors redis-py drops the code; the message may then quote anything.
    if isinstance(error, OutOfMemoryError):
        return "its memory is full (maxmemory)"
    if isinstance(error, ReadOnlyError):
        return "it is a read-only replica"
    if isinstance(error, NoPermissionError):
        return "its user lacks the permission (ACL)"
    if code == "MISCONF":
        return "it cannot write to its disk (MISCONF)"
    return code[:32] if code.isupper() else "a command failed"


def _layout_mismatch(stored: str) -> JobStoreLayoutMismatch:
    return JobStoreLayoutMismatch(layout_fault(stored[:16], JOBS_LAYOUT, _WHAT), retry_after_s=30.0)


def as_fields(reply: Reply) -> dict[str, bytes]:
    """Return a flat list of names and values, such as HGETALL's reply, as a dict."""
    flat = as_list(reply)
    return {as_text(name): as_bytes(value) for name, value in zip(flat[::2], flat[1::2], strict=True)}


def as_list(reply: Reply) -> list[Reply]:
    """Return the reply as a list; empty for any other type."""
    return reply if isinstance(reply, list) else []


def as_bytes(reply: Reply) -> bytes:
    """Return the reply as bytes; empty for nil."""
    return reply if isinstance(reply, bytes) else b"" if reply is None else str(reply).encode()


def as_text(reply: Reply) -> str:
    """Return the reply as a string; empty for nil."""
    return as_bytes(reply).decode("utf-8", "replace")


def as_int(reply: Reply) -> int:
    """Return the reply as a number; 0 for nil."""
    return int(as_bytes(reply) or 0)


async def list_newest(
    db: RedisClient,
    listed: str,
    start: int,
    limit: int,
    command: Callable[[str], tuple[Argument, ...]],
    parse: Callable[[str, Reply], T | None],
) -> list[T]:
    """Return at most `limit` records of the sorted set `listed`, newest first, from rank `start` on.

    Ids whose record has expired (`parse` returns None) leave the set, unreadable records (RecordUnreadable) are left
    out. `command` returns the command that reads an id's record.
    """
    records: list[T] = []
    while len(records) < limit:
        names = [as_text(name) for name in as_list(await db.command("ZREVRANGE", listed, start, start + limit - 1))]
        expired = []
        for name, row in zip(names, await db.commands([command(name) for name in names]), strict=True):
            try:
                record = parse(name, row)
            except RecordUnreadable as error:
                log.warning("%s cannot be read, so it is left out of the list: %s", name, error.message)
                continue
            if record is None:
                expired.append(name)
            else:
                records.append(record)
        if expired:
            await db.command("ZREM", listed, *expired)
        start += len(names) - len(expired)
        if len(names) < limit:
            break
    return records[:limit]
