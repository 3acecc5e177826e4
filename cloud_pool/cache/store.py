"""The door to Redis. Each call is bounded in time; after a fault, which counts, Redis is left alone for a moment."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from typing import NoReturn, cast

import anyio
import msgspec
import redis.asyncio
from redis.exceptions import RedisError

from router.errors import ConfigError

from ..serving.request_context import CachedAnswer
from .config import CacheConfig
from .entry_codec import CorruptEntry, EntryCodec
from .metrics import CacheMetrics
from .scripts import SCRIPTS

RedisReply = bytes | int | None | list["RedisReply"]
Argument = bytes | str | int | float
_BACKGROUND_S = 1.0  # for calls that no client waits for
_CONNECTIONS = 32
_WARM = 4
_CONNECT_S = 2.0
_BATCH = 256
_log = logging.getLogger("causeway.cloud.cache")


class RedisUnavailable(Exception):
    """Redis did not answer, or is being left alone. The request goes on without it."""


class GenerationKey(msgspec.Struct, frozen=True):
    """Where the answer to one question is made: a key, for one rank of askers."""

    key: str
    rank: str


class LeaderLease(msgspec.Struct, frozen=True):
    """Held by this gateway: it makes the answer. `took_over`: from one whose lease ran out."""

    slot: GenerationKey
    fence: str
    took_over: bool = False


class RemoteLeader(msgspec.Struct, frozen=True):
    """Another gateway is making the answer."""

    slot: GenerationKey
    fence: str


class FollowLimitReached(msgspec.Struct, frozen=True):
    """Another gateway is making the answer, and this one may follow no more."""


class StreamEntry(msgspec.Struct, frozen=True):
    """`kind` is chunks, end, failed or wake (see `lua`)."""

    at: bytes
    kind: bytes
    data: bytes


class AnswerStore:
    """`now_ms` replaces Redis's own clock, for tests. On the channel of `home` this gateway can be told things."""

    def __init__(
        self,
        url: str,
        config: CacheConfig,
        codec: EntryCodec,
        metrics: CacheMetrics,
        *,
        home: str,
        clock: Callable[[], float] = time.monotonic,
        now_ms: Callable[[], int] = lambda: -1,
    ) -> None:
        """Raises ConfigError for a URL that is none."""
        self._config = config
        self._codec = codec
        self._metrics = metrics
        self._home = f"{config.key_prefix}:home:{home}"
        self._clock = clock
        self._now_ms = now_ms
        self._retry_at = float("-inf")
        self._redis = _client(url, _CONNECTIONS)
        self._following = _client(url, config.max_followed + 1)  # a follower holds a connection; one is for `listen`
        self._scripts = {name: self._redis.register_script(text) for name, text in SCRIPTS.items()}

    async def close(self) -> None:
        await self._redis.aclose()
        await self._following.aclose()

    # --- asking ------------------------------------------------------------------------------------------------------

    async def enter(
        self, slot: GenerationKey, *, may_follow: bool
    ) -> CachedAnswer | LeaderLease | RemoteLeader | FollowLimitReached:
        """The answer, or who makes it: this gateway where nobody does. Raises Away."""
        config = self._config
        waits_ms = self._interest_ms if may_follow else 0
        arguments = (_ms(config.lease_s), _ms(config.ttl_s), self._home, waits_ms, secrets.token_hex(4))
        while True:
            what, value, more = _three(await self._run("enter", slot, *arguments, timeout_s=config.redis_timeout_s))
            if what == b"hit":
                try:
                    return self._codec.unpack(slot.key, value, int(more) / 1000.0)
                except CorruptEntry as fault:
                    await self._drop(slot, value, fault)
                    continue
            if what == b"lead":
                return LeaderLease(slot, value.decode(), bool(more))
            return RemoteLeader(slot, value.decode()) if what == b"follow" else FollowLimitReached()

    async def stale(self, key: str, most_s: float) -> CachedAnswer | None:
        """The entry, if it is no older than `most_s`. Raises Away."""
        slot = GenerationKey(key, "")
        reply = await self._run("stale", slot, _ms(most_s), timeout_s=self._config.redis_timeout_s)
        if not isinstance(reply, list) or len(reply) != 2:
            return None
        value, age = _bytes(reply[0]), _bytes(reply[1])
        try:
            return self._codec.unpack(key, value, int(age) / 1000.0)
        except CorruptEntry as fault:
            await self._drop(slot, value, fault)
            return None

    async def _drop(self, slot: GenerationKey, value: bytes, fault: CorruptEntry) -> None:
        _log.warning("an entry was no answer and is gone: %s", fault)
        self._metrics.fault("corrupt")
        await self._run("drop", slot, value, timeout_s=self._config.redis_timeout_s)

    # --- leading -----------------------------------------------------------------------------------------------------

    async def renew(self, lease: LeaderLease) -> bool | None:
        """Whether somebody waits on another gateway; None: the lease is lost. Raises Away."""
        return _interest(await self._run("renew", lease.slot, lease.fence, self._lease_ms))

    async def publish(self, lease: LeaderLease, data: bytes) -> bool | None:
        """Renews too. Raises Away."""
        return _interest(await self._run("publish", lease.slot, lease.fence, self._lease_ms, data))

    async def keep(self, lease: LeaderLease, value: bytes, rest: bytes) -> bool:
        """Ends the lease with an answer: kept where there is a `value`. False: it was lost. Raises Away."""
        kept_ms = _ms(self._config.ttl_s + self._config.stale_if_error_s)
        return bool(await self._run("keep", lease.slot, lease.fence, value, kept_ms, rest))

    async def release(self, lease: LeaderLease) -> None:
        """Ends the lease without an answer. Raises Away."""
        await self._run("close", lease.slot, lease.fence)

    async def leave(self, lease: LeaderLease) -> bool:
        """Nobody here wants the answer any more. True: somebody elsewhere does; else the lease is over. Raises Away."""
        return bool(await self._run("leave", lease.slot, lease.fence))

    # --- following ---------------------------------------------------------------------------------------------------

    async def watch(self, leader: RemoteLeader) -> bool:
        """Says that this gateway waits. False: the leader will say nothing more. Raises Away."""
        return bool(await self._run("watch", leader.slot, leader.fence, self._interest_ms))

    async def read(self, leader: RemoteLeader, after: bytes, wait_s: float) -> list[StreamEntry]:
        """What the leader has said, waiting for it at most about `wait_s`. Raises Away."""
        key = f"{self._base(leader.slot)}:flow:{leader.slot.rank}:{leader.fence}"
        blocking: tuple[Argument, ...] = ("BLOCK", max(1, _ms(wait_s))) if wait_s > 0 else ()
        self._check_open()
        try:
            with anyio.fail_after(wait_s + _BACKGROUND_S):
                reply = await self._following.execute_command(  # type: ignore[no-untyped-call]
                    "XREAD", "COUNT", _BATCH, *blocking, "STREAMS", key, after
                )
        except (RedisError, OSError, TimeoutError) as error:
            self._away(error)
        if not reply:
            return []
        ((_, rows),) = reply
        return [StreamEntry(at, *_fields(fields)) for at, fields in rows]

    async def listen(self, told: Callable[[GenerationKey], None]) -> None:
        """Until cancelled: calls `told` when somebody on another gateway waits for what this one makes."""
        start, end = f"{self._config.key_prefix}:{{".encode(), b"}"
        await self._connect()
        while True:
            try:
                async with self._following.pubsub(ignore_subscribe_messages=True) as channel:
                    await channel.subscribe(self._home)
                    async for message in channel.listen():
                        base, _, rank = cast("bytes", message["data"]).rpartition(b" ")
                        if base.startswith(start) and base.endswith(end):
                            told(GenerationKey(base[len(start) : -1].decode(), rank.decode()))
            except (RedisError, OSError, UnicodeDecodeError):
                self._metrics.fault("wakeups_unavailable")  # renewals still say who waits, later
            await anyio.sleep(self._config.redis_retry_after_s)

    async def _connect(self) -> None:
        """Connections that are there when the first requests come: these have no time to wait for one that is far."""
        with anyio.move_on_after(_CONNECT_S):
            pings = (self._redis.execute_command("PING") for _ in range(_WARM))  # type: ignore[no-untyped-call]
            await asyncio.gather(*pings, return_exceptions=True)

    # --- the call ----------------------------------------------------------------------------------------------------

    @property
    def _lease_ms(self) -> int:
        return _ms(self._config.lease_s)

    @property
    def _interest_ms(self) -> int:
        """A follower says that it waits three times in this time."""
        return _ms(2 * self._config.lease_s)

    def _base(self, slot: GenerationKey) -> str:
        return f"{self._config.key_prefix}:{{{slot.key}}}"

    async def _run(
        self, script: str, slot: GenerationKey, *arguments: Argument, timeout_s: float = _BACKGROUND_S
    ) -> RedisReply:
        """Raises Away."""
        self._check_open()
        try:
            with anyio.fail_after(timeout_s):
                args = [self._now_ms(), slot.rank, *arguments]
                return cast("RedisReply", await self._scripts[script](keys=[self._base(slot)], args=args))
        except (RedisError, OSError, TimeoutError) as error:
            self._away(error)

    def _check_open(self) -> None:
        if self._clock() < self._retry_at:
            self._metrics.fault("redis_unavailable")
            raise RedisUnavailable

    def _away(self, error: Exception) -> NoReturn:
        # Redis's own words may quote arguments: only the error's code is told.
        if self._clock() >= self._retry_at:  # the first of many at once
            code = str(error).partition(" ")[0][:32]
            _log.warning("answers are not shared for now: %s %s", type(error).__name__, code)
        self._metrics.fault("redis_unavailable")
        self._retry_at = self._clock() + self._config.redis_retry_after_s
        raise RedisUnavailable from error


def _client(url: str, connections: int) -> redis.asyncio.Redis:
    """Raises ConfigError."""
    try:
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            url, protocol=2, retry=None, socket_connect_timeout=_CONNECT_S, max_connections=connections, timeout=None
        )
    except ValueError as error:
        raise ConfigError(f"not the URL of a Redis: {error}", where="redis") from error
    client = redis.asyncio.Redis.from_pool(pool)
    client.response_callbacks.clear()  # replies as they come: lists, bytes, numbers
    return client


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _interest(reply: RedisReply) -> bool | None:
    return None if reply == -1 else reply == 1


def _three(reply: RedisReply) -> tuple[bytes, bytes, bytes]:
    assert isinstance(reply, list)
    what, value, more = reply
    return _bytes(what), _bytes(value), _bytes(more)


def _bytes(reply: RedisReply) -> bytes:
    return reply if isinstance(reply, bytes) else b"" if reply is None else str(reply).encode()


def _fields(flat: list[bytes]) -> tuple[bytes, bytes]:
    found = dict(zip(flat[::2], flat[1::2], strict=True))
    return found.get(b"kind", b""), found.get(b"data", b"")
