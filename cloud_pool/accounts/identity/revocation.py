"""Tokens and devices that are refused before they expire. The list is in Redis; each gateway has a copy.

    causeway:{revoked}:version   grows with each change: one GET tells whether the copy is current
    causeway:{revoked}:tokens    sorted set: `jti` by the time at which the token expires; then it may be forgotten
    causeway:{revoked}:devices   hash: `tenant/device` -> unix time; tokens that were issued until then are refused

The braces keep the keys in one slot of a cluster, since transactions change several.
The copy is read again every `revocations_refresh_s`. While Redis is unavailable the copy stays as it is (see
`IdentityConfig.when_revocations_stale`). A Redis that comes back without its data revokes nothing less: revocations
that were read before stay in force.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import anyio
import msgspec
import redis.asyncio
from anyio import to_thread
from redis.exceptions import RedisError

from router.errors import AuthenticationFailed, IdentityUnavailable

from .claims import Claims
from .config import IdentityConfig

VERSION_KEY = "causeway:{revoked}:version"
TOKENS_KEY = "causeway:{revoked}:tokens"
DEVICES_KEY = "causeway:{revoked}:devices"
REVOCATION_RETENTION_S = 600.0  # after a token's expiry: more than the largest `clock_skew_s`
_READ_S = 10.0
_log = logging.getLogger("causeway.cloud.identity")


class RevocationSnapshot(msgspec.Struct, frozen=True):
    """A copy of the list."""

    version: int = 0
    tokens: Mapping[str, float] = {}  # jti -> unix time of its expiry
    devices: Mapping[str, float] = {}  # tenant/device -> unix time of the revocation

    def check(self, claims: Claims) -> None:
        """Raises AuthenticationFailed for a revoked token or device."""
        if claims.jti in self.tokens:
            raise AuthenticationFailed("the token has been revoked")
        revoked_at = self.devices.get(claims.owner)
        if revoked_at is not None and claims.iat <= revoked_at:
            raise AuthenticationFailed("the device's tokens have been revoked")

    def merged_with(self, other: RevocationSnapshot, now: float) -> RevocationSnapshot:
        """Return the union with `other`, under its version, without tokens that expired long before `now` (unix, s)."""
        devices = {
            name: max(self.devices.get(name, 0.0), other.devices.get(name, 0.0))
            for name in {**self.devices, **other.devices}
        }
        tokens = {
            jti: expiry
            for jti, expiry in {**self.tokens, **other.tokens}.items()
            if expiry > now - REVOCATION_RETENTION_S
        }
        return RevocationSnapshot(other.version, tokens, devices)


class RevocationList:
    """A gateway's copy of the revocations.

    `stale_accepts` counts the requests that were accepted with a copy that was too old. `last_error` is why the last
    refresh failed, "" if it did not.

    Args:
        client: None for no list: nothing is revoked but what `revocations_file` holds
        clock: monotonic time, s
        wall_clock: unix time, s
    """

    def __init__(
        self,
        config: IdentityConfig,
        client: redis.asyncio.Redis | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._redis = client
        self._clock = clock
        self._wall_clock = wall_clock
        self._file = Path(config.revocations_file) if config.revocations_file else None
        self._read_at = float("-inf") if client is not None else float("inf")
        self.current = self._read_copy()
        self.stale_accepts = 0
        self.last_error = ""

    def check(self, claims: Claims) -> None:
        """Check a token.

        Raises:
            AuthenticationFailed: the token or its device is revoked
            IdentityUnavailable: the copy is too old (`when_revocations_stale: deny`)
        """
        if self._clock() - self._read_at > self._config.revocations_max_age_s:
            if self._config.when_revocations_stale == "deny":
                raise IdentityUnavailable("the list of revoked tokens cannot be read", retry_after_s=5.0)
            self.stale_accepts += 1
        self.current.check(claims)

    async def watch(self) -> None:
        """Refresh every `revocations_refresh_s`, until cancelled."""
        while self._redis is not None:
            await self.refresh()
            await anyio.sleep(self._config.revocations_refresh_s)

    async def refresh(self) -> None:
        """Read the list if it changed. Errors are kept in `last_error`, never raised."""
        if self._redis is None:
            return
        try:
            with anyio.fail_after(_READ_S):
                await self._read(self._redis)
        except (RedisError, OSError, TimeoutError, ValueError) as error:
            if not self.last_error:
                _log.warning("the list of revoked tokens cannot be read: %s", error)
            self.last_error = str(error) or type(error).__name__
            return
        self.last_error = ""
        self._read_at = self._clock()

    async def _read(self, client: redis.asyncio.Redis) -> None:
        if int(await client.get(VERSION_KEY) or 0) == self.current.version:
            return
        async with client.pipeline(transaction=True) as pipe:
            pipe.get(VERSION_KEY)
            pipe.zrange(TOKENS_KEY, 0, -1, withscores=True)
            pipe.hgetall(DEVICES_KEY)
            version, tokens, devices = await pipe.execute()
        snapshot = RevocationSnapshot(
            int(version or 0),
            {_text(jti): float(expiry) for jti, expiry in tokens},
            {_text(name): float(revoked_at) for name, revoked_at in devices.items()},
        )
        if snapshot.version < self.current.version:
            _log.error("Redis has lost revocations; those that this gateway knows stay in force")
        # Revocations are never withdrawn, so those known before are still valid.
        self.current = self.current.merged_with(snapshot, self._wall_clock())
        await to_thread.run_sync(self._write_copy)

    def _read_copy(self) -> RevocationSnapshot:
        if self._file is None or not self._file.exists():
            return RevocationSnapshot()
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=RevocationSnapshot)
        except (OSError, msgspec.DecodeError) as error:
            _log.warning("%s: the copy of the revocations cannot be read: %s", self._file, error)
            return RevocationSnapshot()

    def _write_copy(self) -> None:
        if self._file is None:
            return
        temporary = self._file.with_name(f".{self._file.name}.{secrets.token_hex(4)}")
        try:
            temporary.write_bytes(msgspec.json.encode(self.current))
            temporary.replace(self._file)
        except OSError as error:
            _log.warning("%s: the copy of the revocations cannot be written: %s", self._file, error)


async def revoke_token(client: redis.asyncio.Redis, jti: str, expiry: float, now: float) -> None:
    """Revoke a token and forget those that expired long ago. Times are unix, s. Raises RedisError."""
    async with client.pipeline(transaction=True) as pipe:
        pipe.zadd(TOKENS_KEY, {jti: expiry})
        pipe.zremrangebyscore(TOKENS_KEY, "-inf", now - REVOCATION_RETENTION_S)
        pipe.incr(VERSION_KEY)
        await pipe.execute()


async def revoke_device(client: redis.asyncio.Redis, owner: str, now: float) -> None:
    """Revoke all tokens of a device (`tenant/device`) issued until `now` (unix, s). Raises RedisError."""
    async with client.pipeline(transaction=True) as pipe:
        pipe.hset(DEVICES_KEY, owner, str(now))
        pipe.incr(VERSION_KEY)
        await pipe.execute()


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
