"""Calls to Redis, each bounded in time. After a fault, which is counted, Redis is not used for a moment.

The scripts in `lua` run in Redis atomically, each behind `common.lua`; arguments and replies are in each file. KEYS[1]
is `<prefix>:{<key>}`: all keys of one answer are in one hash slot.

    ...:entry                 hash    at (ms), value: the answer, sealed; of: marks of its subjects (`core.subject`)
    ...:lease:<rank>          hash    fence, open (1 while held), until (ms), home (channel of the leader's gateway),
                                      wanted (ms: a follower on another gateway waits until then). Fences never repeat
    ...:flow:<rank>:<fence>   stream  kind and data: `chunks`, `end` (the last chunks), `failed`, or `wake`, for an
                                      answer that ended before its leader learned that a follower waits

A rank is a priority: an urgent request never follows a leader of lower priority. Times are Redis's own, in ms, so that
gateways with different clocks agree; tests pass a time instead (ARGV[1] >= 0). Every key has a time to live.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Literal, NoReturn, cast

import anyio
import msgspec
from prometheus_client import CollectorRegistry, Counter
from redis.exceptions import RedisError

from causeway_server.router.errors import JobStoreUnavailable, RecordUnreadable
from causeway_server.router.serving.metrics import described

from ..core.request_context import CachedAnswer
from ..redis.config import RedisAddress, shown_address
from ..redis.connect import ConnectionOptions, is_unreachable, open_redis, redis_fault
from ..redis.keys import load_script
from ..storage.encryption import NO_CIPHER, ContentCipher
from .config import CacheConfig
from .entry_codec import CorruptEntry, EntryCodec

CacheStatus = Literal["hit", "stale", "miss", "coalesced", "bypass"]
Fault = Literal[
    "redis_unavailable", "corrupt", "wakeups_unavailable", "lost_lease", "leader_takeover", "not_stored", "follow_limit"
]
_LUA: Final = f"{__package__}.lua"
_COMMON: Final = load_script(_LUA, "common")
_NAMES: Final = ("enter", "renew", "publish", "keep", "close", "leave", "watch", "stale", "drop")

SCRIPTS: Final = {name: load_script(_LUA, name, _COMMON) for name in _NAMES}
RedisReply = bytes | int | None | list["RedisReply"]
Argument = bytes | str | int | float
_BACKGROUND_S = 1.0  # timeout of calls without a waiting client
_CONNECTIONS = 32
_WARM_CONNECTIONS = 4
_CONNECT_S = 2.0
_BATCH = 256
log = logging.getLogger(__name__)


class CacheMetrics:
    """Prometheus metrics of the shared cache. Callers cannot choose label values. The faults:

    redis_unavailable    a call that Redis did not answer, or that was skipped after a failure
    wakeups_unavailable  the subscription for other gateways' wake-ups is down
    lost_lease           another gateway took a living leader for dead
    leader_takeover      a follower continued the answer of a dead leader
    not_stored           the answer was too large or incomplete
    follow_limit         too many answers were followed at once, so one more was generated
    corrupt              an entry could not be read
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = described(Counter, registry, "causeway_gateway_cache_requests", ("outcome",))
        self._faults = described(Counter, registry, "causeway_gateway_cache_faults", ("fault",))

    def answered(self, status: CacheStatus) -> None:
        self._requests.labels(status).inc()

    def fault(self, fault: Fault) -> None:
        self._faults.labels(fault).inc()


class RedisUnavailable(Exception):
    """Redis did not answer, or is not used because of a recent fault. The request continues without the cache."""


class GenerationKey(msgspec.Struct, frozen=True):
    """Identity of a generation: a cache key, for the requests of one rank (see `caching_service`)."""

    cache_key: str
    rank: str


class LeaderLease(msgspec.Struct, frozen=True):
    """A lease of this gateway, which generates the answer. `took_over`: from a leader whose lease had expired."""

    key: GenerationKey
    fence: str
    took_over: bool = False


class RemoteLeader(msgspec.Struct, frozen=True):
    """A leader on another gateway, which generates the answer."""

    key: GenerationKey
    fence: str


class FollowLimitReached(msgspec.Struct, frozen=True):
    """The answer is generated on another gateway, but this gateway already follows the maximum number of answers."""


class StreamEntry(msgspec.Struct, frozen=True):
    """An entry of a leader's stream; `kind` is chunks, end, failed or wake (see `lua`)."""

    id: bytes
    kind: bytes
    data: bytes


class AnswerStore:
    """Stored answers, leases and streams in Redis; `SharedCache` has the parameters. Raises ConfigError."""

    def __init__(
        self,
        address: RedisAddress,
        config: CacheConfig,
        codec: EntryCodec,
        metrics: CacheMetrics,
        *,
        gateway_id: str,
        cipher: ContentCipher = NO_CIPHER,
        clock: Callable[[], float] = time.monotonic,
        now_ms: Callable[[], int] = lambda: -1,
    ) -> None:
        self._config = config
        self._codec = codec
        self._metrics = metrics
        self._cipher = cipher
        self._channel = f"{config.key_prefix}:home:{gateway_id}"  # of pub/sub, for wake-ups
        self._clock = clock
        self._now_ms = now_ms
        self._suspended_until = float("-inf")
        where = "cache.redis" if config.redis else "redis"
        self._address = shown_address(address)
        self._redis = open_redis(address, where, ConnectionOptions(connections=_CONNECTIONS, raw=True))
        # A follower holds a connection; one more is for `watch_wakeups`. While `read` waits, for less than a lease, no
        # reply comes: the client's own timeout, by default 5 s, must not end that.
        following = ConnectionOptions(
            connections=config.max_followed + 1, timeout_s=config.lease_s + _BACKGROUND_S, raw=True
        )
        self._following = open_redis(address, where, following)
        self._scripts = {name: self._redis.register_script(text) for name, text in SCRIPTS.items()}

    async def close(self) -> None:
        await self._redis.aclose()
        await self._following.aclose()

    # --- looking up --------------------------------------------------------------------------------------------------

    async def join_or_lead(
        self, key: GenerationKey, *, may_follow: bool
    ) -> CachedAnswer | LeaderLease | RemoteLeader | FollowLimitReached:
        """Return the stored answer, or its leader on another gateway, or become the leader.

        Raises RedisUnavailable: the request has to continue without the cache.
        """
        config = self._config
        interest_ms = self._interest_ms if may_follow else 0
        arguments = (_ms(config.lease_s), _ms(config.ttl_s), self._channel, interest_ms, secrets.token_hex(4))
        while True:
            reply = await self._run("enter", key, *arguments, timeout_s=config.redis_timeout_s)
            outcome, value, more = _three(reply)
            if outcome == b"hit":
                try:
                    return self._codec.unpack(key.cache_key, self._open(key, value), int(more) / 1000.0)
                except CorruptEntry as fault:
                    await self._drop(key, value, fault)
                    continue
            if outcome == b"lead":
                return LeaderLease(key, value.decode(), bool(more))
            return RemoteLeader(key, value.decode()) if outcome == b"follow" else FollowLimitReached()

    async def find_stale(self, cache_key: str, max_age_s: float) -> CachedAnswer | None:
        """Return the entry unless it is older than `max_age_s`. Raises RedisUnavailable."""
        key = GenerationKey(cache_key, "")
        reply = await self._run("stale", key, _ms(max_age_s), timeout_s=self._config.redis_timeout_s)
        if not isinstance(reply, list) or len(reply) != 2:
            return None
        value, age = _bytes(reply[0]), _bytes(reply[1])
        try:
            return self._codec.unpack(cache_key, self._open(key, value), int(age) / 1000.0)
        except CorruptEntry as fault:
            await self._drop(key, value, fault)
            return None

    async def _drop(self, key: GenerationKey, value: bytes, fault: CorruptEntry) -> None:
        log.warning("A corrupt cache entry was deleted: %s", fault)
        self._metrics.fault("corrupt")
        await self._run("drop", key, value, timeout_s=self._config.redis_timeout_s)

    # --- leading (all raise RedisUnavailable) ------------------------------------------------------------------------

    async def renew(self, lease: LeaderLease) -> bool | None:
        """Renew the lease; return whether another gateway waits for the answer, or None if the lease is lost."""
        return _interest(await self._run("renew", lease.key, lease.fence, self._lease_ms))

    async def publish(self, lease: LeaderLease, data: bytes) -> bool | None:
        """Append chunks to the stream and renew the lease, with the same result as `renew`."""
        return _interest(
            await self._run("publish", lease.key, lease.fence, self._lease_ms, self._seal(lease.key, data))
        )

    async def finish(self, lease: LeaderLease, value: bytes, rest: bytes, marks: str) -> bool:
        """End the lease with an answer; return False if the lease was lost. `marks`: of the answer's subjects.

        Args:
            value: Entry to store; b"" to store none.
            rest: Chunks that were not published yet; b"" if no other gateway waits.
        """
        keep_ms = _ms(self._config.ttl_s + self._config.stale_if_error_s)
        value, rest = self._seal(lease.key, value), self._seal(lease.key, rest)
        return bool(await self._run("keep", lease.key, lease.fence, value, keep_ms, rest, marks))

    async def release(self, lease: LeaderLease) -> None:
        """End the lease without an answer."""
        await self._run("close", lease.key, lease.fence)

    async def release_if_unwanted(self, lease: LeaderLease) -> bool:
        """End the lease unless another gateway waits for the answer; return whether one waits."""
        return bool(await self._run("leave", lease.key, lease.fence))

    # --- following ---------------------------------------------------------------------------------------------------

    async def announce_interest(self, leader: RemoteLeader) -> bool:
        """Tell the leader that this gateway waits; False if no chunks follow. Raises RedisUnavailable."""
        return bool(await self._run("watch", leader.key, leader.fence, self._interest_ms))

    async def read(self, leader: RemoteLeader, after: bytes, wait_s: float) -> list[StreamEntry]:
        """Read the leader's stream after `after`, for about `wait_s`. Raises RedisUnavailable or CorruptEntry."""
        key = f"{self._base(leader.key)}:flow:{leader.key.rank}:{leader.fence}"
        blocking: tuple[Argument, ...] = ("BLOCK", max(1, _ms(wait_s))) if wait_s > 0 else ()
        self._check_available()
        try:
            with anyio.fail_after(wait_s + _BACKGROUND_S):
                reply = await self._following.execute_command(  # type: ignore[no-untyped-call]
                    "XREAD", "COUNT", _BATCH, *blocking, "STREAMS", key, after
                )
        except (RedisError, OSError, TimeoutError) as error:
            self._unavailable(error)
        if not reply:
            return []
        ((_, rows),) = reply
        return [self._entry(leader.key, entry_id, *_fields(fields)) for entry_id, fields in rows]

    def _entry(self, key: GenerationKey, entry_id: bytes, kind: bytes, data: bytes) -> StreamEntry:
        return StreamEntry(entry_id, kind, self._open(key, data))

    async def watch_wakeups(self, wake: Callable[[GenerationKey], None]) -> None:
        """Call `wake` whenever another gateway begins to wait for an answer of this one. Runs until cancelled."""
        start, end = f"{self._config.key_prefix}:{{".encode(), b"}"
        await self._connect()
        while True:
            try:
                await self._following.initialize()  # a cluster's client has to know its nodes first
                async with self._following.pubsub(ignore_subscribe_messages=True) as channel:
                    await channel.subscribe(self._channel)
                    async for message in channel.listen():
                        base, _, rank = cast("bytes", message["data"]).rpartition(b" ")
                        if base.startswith(start) and base.endswith(end):
                            wake(GenerationKey(base[len(start) : -1].decode(), rank.decode()))
            except (RedisError, OSError, UnicodeDecodeError):
                self._metrics.fault("wakeups_unavailable")  # the next renewal still reports the followers
            await anyio.sleep(self._config.redis_retry_after_s)

    async def _connect(self) -> None:
        """Open connections before the first requests, which have no time to wait for a distant Redis."""
        with anyio.move_on_after(_CONNECT_S):
            async with anyio.create_task_group() as tasks:  # `gather` hides whose cancellation it was: all would end
                for _ in range(_WARM_CONNECTIONS):
                    tasks.start_soon(self._ping)

    async def _ping(self) -> None:
        with suppress(RedisError, OSError):
            await self._redis.execute_command("PING")  # type: ignore[no-untyped-call]

    # --- encryption --------------------------------------------------------------------------------------------------

    def _seal(self, key: GenerationKey, data: bytes) -> bytes:
        return self._cipher.seal(data, "cached", "", key.cache_key) if data else b""

    def _open(self, key: GenerationKey, stored: bytes) -> bytes:
        """Raise CorruptEntry for a value that was modified, or is sealed with a key that this gateway lacks."""
        try:
            return self._cipher.open(stored, "cached", "", key.cache_key)
        except (JobStoreUnavailable, RecordUnreadable) as error:
            raise CorruptEntry(error.message) from None

    # --- the call ----------------------------------------------------------------------------------------------------

    @property
    def is_suspended(self) -> bool:
        return self._clock() < self._suspended_until

    def suspend(self, seconds: float) -> None:
        """Stop using Redis for this many seconds: calls raise RedisUnavailable at once."""
        self._suspended_until = self._clock() + seconds

    @property
    def _lease_ms(self) -> int:
        return _ms(self._config.lease_s)

    @property
    def _interest_ms(self) -> int:
        """Return the validity of announced interest in ms; a follower renews it three times within."""
        return _ms(2 * self._config.lease_s)

    def _base(self, key: GenerationKey) -> str:
        return f"{self._config.key_prefix}:{{{key.cache_key}}}"

    async def _run(
        self, script: str, key: GenerationKey, *arguments: Argument, timeout_s: float = _BACKGROUND_S
    ) -> RedisReply:
        """Run a script. Raises RedisUnavailable."""
        self._check_available()
        try:
            with anyio.fail_after(timeout_s):
                args = [self._now_ms(), key.rank, *arguments]
                return cast("RedisReply", await self._scripts[script](keys=[self._base(key)], args=args))
        except (RedisError, OSError, TimeoutError) as error:
            self._unavailable(error)

    def _check_available(self) -> None:
        if self.is_suspended:
            self._metrics.fault("redis_unavailable")
            raise RedisUnavailable

    def _unavailable(self, error: Exception) -> NoReturn:
        if not self.is_suspended:  # the first of many concurrent failures
            # Where Redis answers, its message may quote arguments: only the error's code is logged.
            code = f"Redis at {self._address} answered with {type(error).__name__} {str(error).partition(' ')[0][:32]}"
            reason = redis_fault(error, self._address) if is_unreachable(error) else code
            log.warning("The shared cache is unavailable: %s", reason)
        self._metrics.fault("redis_unavailable")
        self.suspend(self._config.redis_retry_after_s)
        raise RedisUnavailable from error


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _interest(reply: RedisReply) -> bool | None:
    return None if reply == -1 else reply == 1


def _three(reply: RedisReply) -> tuple[bytes, bytes, bytes]:
    assert isinstance(reply, list)
    first, second, third = reply
    return _bytes(first), _bytes(second), _bytes(third)


def _bytes(reply: RedisReply) -> bytes:
    return reply if isinstance(reply, bytes) else b"" if reply is None else str(reply).encode()


def _fields(flat: list[bytes]) -> tuple[bytes, bytes]:
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    return fields.get(b"kind", b""), fields.get(b"data", b"")
