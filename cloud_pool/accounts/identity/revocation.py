"""Tokens and devices that are refused before they expire. The list is in Redis; each gateway and worker has a copy.

    causeway:{revoked}:version   grows with each change
    causeway:{revoked}:nonce     another one after each change
    causeway:{revoked}:epoch     grows when a loss was repaired
    causeway:{revoked}:tokens    sorted set: `jti` by the time at which the token expires; then it may be forgotten
    causeway:{revoked}:devices   hash: `tenant/device` -> unix time; tokens that were issued until then are refused,
                                 and forgotten once they have all expired

The braces keep the keys in one slot of a cluster, since scripts change several.
The copy is read again every `revocations_refresh_s` if version, nonce or epoch have changed. Two histories never look
the same: where a promoted replica lacks a change, the next change gives the same version and another nonce.

Revocations are never withdrawn. A Redis that is behind what this process has seen, because an older replica was
promoted or its data is lost, hides nothing: the copy stays in force, and this process writes what Redis lacks back
into it, under the next epoch, for processes that have no copy. A revocation is lost only if Redis loses it before any
gateway has read it. While Redis is unavailable the copy stays as it is (see `IdentityConfig.when_revocations_stale`).

A Redis whose memory is full serves all of this: it refuses every command of a transaction, so the list is read outside
of one, position first, and scripts that may use more memory write it.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import anyio
import msgspec
import redis.asyncio
from anyio import to_thread
from redis.exceptions import RedisError

from causeway_server.router.errors import IdentityUnavailable
from causeway_server.router.serving.folders import write_atomically

from ...redis.connect import client_fault
from ...redis.keys import load_script
from .config import IdentityConfig
from .fleet import DEVICE_RETENTION_S, REVOCATION_RETENTION_S, FleetTrust, RevocationSnapshot

EPOCH_KEY = "causeway:{revoked}:epoch"
VERSION_KEY = "causeway:{revoked}:version"
NONCE_KEY = "causeway:{revoked}:nonce"
TOKENS_KEY = "causeway:{revoked}:tokens"
DEVICES_KEY = "causeway:{revoked}:devices"
REVOKE_SCRIPT: Final = load_script(f"{__package__}.lua", "revoke")
RESTORE_REVOCATIONS_SCRIPT: Final = load_script(f"{__package__}.lua", "restore_revocations")
_READ_S = 10.0
_KEEP_SHARE = 0.25  # of `revocations_max_age_s`: an unchanged copy on disk is written again after that time
log = logging.getLogger(__name__)


class _RevocationCopy(RevocationSnapshot, frozen=True):
    """The copy on disk. `read_at`: Unix time in seconds; 0 in a copy of an older version."""

    read_at: float = 0.0


class RevocationList:
    """A gateway's copy of the revocations, and those of its fleet, which never enter Redis.

    `stale_accepts` counts requests accepted with a copy that was too old, `restored` the revocations that Redis had
    lost and got back. `last_error`: why the last refresh failed, "" if it succeeded.

    Args:
        client: Redis; None: only `revocations_file` and the fleet revoke tokens.
        clock, wall_clock: Monotonic clock, and Unix time, in seconds.
    """

    def __init__(
        self,
        config: IdentityConfig,
        client: redis.asyncio.Redis | None,
        fleet: FleetTrust | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._redis = client
        self._fleet = fleet
        self._clock = clock
        self._wall_clock = wall_clock
        self._file = Path(config.revocations_file) if config.revocations_file else None
        copy = self._read_copy()
        self._has_copy = client is None or copy is not None
        self._kept_at = float("-inf")
        self.current: RevocationSnapshot = copy or RevocationSnapshot()
        self._read_at = float("inf") if client is None else clock() - self._age_s(copy)
        self._read_marks: list[object] | None = None
        self._restore_fails = False
        self.stale_accepts = 0
        self.restored = 0
        self.last_error = ""

    @property
    def has_copy(self) -> bool:
        """Whether there is a copy of every list, however old; otherwise each signed token is refused."""
        return self._has_copy and (self._fleet is None or self._fleet.has_copy)

    def check(self, owner: str, token_id: str, issued: float) -> None:
        """Check a signed token, of a request or of the request that submitted a job. `issued`: Unix time in seconds.

        Raises:
            AuthenticationFailed: The token or its device is revoked.
            IdentityUnavailable: There is no copy, or it is too old (`when_revocations_stale: deny`).
        """
        if not self.has_copy:
            raise IdentityUnavailable("This gateway has not read the list of revoked tokens yet.", retry_after_s=5.0)
        read_at = self._read_at if self._fleet is None else min(self._read_at, self._fleet.read_at)
        if self._clock() - read_at > self._config.revocations_max_age_s:
            if self._config.when_revocations_stale == "deny":
                raise IdentityUnavailable("The list of revoked tokens cannot be read.", retry_after_s=5.0)
            self.stale_accepts += 1
        self.check_again(owner, token_id, issued)

    def check_again(self, owner: str, token_id: str, issued: float) -> None:
        """Check an accepted token again. Raises AuthenticationFailed if it has been revoked since."""
        self.current.check(owner, token_id, issued)
        if self._fleet is not None:
            self._fleet.revocations.check(owner, token_id, issued)

    async def watch(self) -> None:
        """Refresh every `revocations_refresh_s`, until cancelled."""
        while self._redis is not None:
            await self.refresh()
            await anyio.sleep(self._config.revocations_refresh_s)

    async def refresh(self) -> None:
        """Read the list if it changed. Errors are stored in `last_error`, never raised."""
        if self._redis is None:
            return
        try:
            with anyio.fail_after(_READ_S):
                await self._read(self._redis)
        except (RedisError, OSError, TimeoutError, ValueError) as error:
            reason = str(error) if isinstance(error, ValueError) else client_fault(error, self._redis)
            if not self.last_error:
                log.warning("The list of revoked tokens cannot be read: %s", reason)
            self.last_error = reason
            return
        if self.last_error:
            log.info("The list of revoked tokens can be read again.")
        self.last_error = ""
        self._read_at, self._has_copy = self._clock(), True
        await self._keep_copy()

    async def _read(self, client: redis.asyncio.Redis) -> None:
        async with client.pipeline(transaction=False) as pipe:
            marks = await _get_marks(pipe).execute()
            if marks == self._read_marks:
                return
            # The list may be newer than the marks, never older: the next refresh then reads it again.
            pipe.zrange(TOKENS_KEY, 0, -1, withscores=True)
            pipe.hgetall(DEVICES_KEY)
            tokens, devices = await pipe.execute()
        epoch, version, _ = marks
        snapshot = RevocationSnapshot(
            int(epoch or 0),
            int(version or 0),
            {_text(jti): float(expiry) for jti, expiry in tokens},
            {_text(name): float(revoked_at) for name, revoked_at in devices.items()},
        )
        now = self._wall_clock()
        self.current = self.current.merged_with(snapshot, now)
        self._kept_at = float("-inf")
        missing = self.current.without(snapshot, now)
        if missing.tokens or missing.devices:
            await self._restore(client, missing)
        else:
            self._read_marks = marks

    async def _restore(self, client: redis.asyncio.Redis, missing: RevocationSnapshot) -> None:
        """Write the revocations that Redis has lost back into it. The next refresh reads the result."""
        count = len(missing.tokens) + len(missing.devices)
        keys = (EPOCH_KEY, VERSION_KEY, NONCE_KEY, TOKENS_KEY, DEVICES_KEY)
        pairs = (*missing.tokens.items(), *missing.devices.items())
        arguments = (*self.current.position, secrets.token_hex(8), len(missing.tokens))
        parts = (str(part) for pair in pairs for part in pair)
        try:
            await client.eval(RESTORE_REVOCATIONS_SCRIPT, len(keys), *keys, *map(str, arguments), *parts)
        except RedisError as error:
            if not self._restore_fails:
                log.error(
                    "Redis has lost %d revocations. They stay in force on this gateway, but cannot be written back "
                    "to Redis: %s",
                    count,
                    error,
                )
            self._restore_fails = True
            return
        log.error("Redis had lost %d revocations. They stayed in force on this gateway and are in Redis again.", count)
        self._restore_fails = False
        self.restored += count

    def _read_copy(self) -> _RevocationCopy | None:
        if self._file is None or not self._file.exists():
            return None
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=_RevocationCopy)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            log.warning("%s: the copy of the revocations cannot be read: %s", self._file, error)
            return None

    def _age_s(self, copy: _RevocationCopy | None) -> float:
        return float("inf") if copy is None else max(0.0, self._wall_clock() - copy.read_at)

    async def _keep_copy(self) -> None:
        """Write the copy to disk if it has changed, or if the copy there is about to become stale."""
        if self._file is not None and self._clock() - self._kept_at >= self._config.revocations_max_age_s * _KEEP_SHARE:
            self._kept_at = self._clock()
            current = self.current
            copy = _RevocationCopy(current.epoch, current.version, current.tokens, current.devices, self._wall_clock())
            await to_thread.run_sync(_write_copy, self._file, copy)


def _write_copy(path: Path, copy: _RevocationCopy) -> None:
    try:
        write_atomically(path, msgspec.json.encode(copy), 0o600)
    except OSError as error:
        log.warning("%s: the copy of the revocations cannot be written: %s", path, error)


async def revoke_token(client: redis.asyncio.Redis, jti: str, expiry: float, now: float) -> None:
    """Revoke a token, and delete revocations of long expired ones. Times are Unix seconds. Raises RedisError."""
    await _revoke(client, "token", jti, expiry, now - REVOCATION_RETENTION_S)


async def revoke_device(client: redis.asyncio.Redis, owner: str, now: float) -> None:
    """Revoke the tokens of a device (`tenant/device`) issued until `now` (Unix s). Raises RedisError."""
    await _revoke(client, "device", owner, now, now - DEVICE_RETENTION_S)


async def is_replicated(client: redis.asyncio.Redis, replicas: int, timeout_s: float) -> bool:
    """Wait until this number of replicas has every revocation written so far. Raises RedisError."""
    keys = (VERSION_KEY, NONCE_KEY, TOKENS_KEY, DEVICES_KEY)
    async with client.pipeline(transaction=False) as pipe:
        # WAIT counts writes of its own connection and all before them.
        pipe.eval(REVOKE_SCRIPT, len(keys), *keys, secrets.token_hex(8))
        pipe.wait(replicas, int(timeout_s * 1000))
        _, confirmed = await pipe.execute()
    return int(confirmed) >= replicas


async def _revoke(client: redis.asyncio.Redis, kind: str, name: str, at: float, forget_before: float) -> None:
    keys = (VERSION_KEY, NONCE_KEY, TOKENS_KEY, DEVICES_KEY)
    arguments = (secrets.token_hex(8), kind, name, str(at), str(forget_before))
    await client.eval(REVOKE_SCRIPT, len(keys), *keys, *arguments)


def _get_marks(pipe: redis.asyncio.client.Pipeline) -> redis.asyncio.client.Pipeline:
    for key in (EPOCH_KEY, VERSION_KEY, NONCE_KEY):
        pipe.get(key)
    return pipe


def _text(value: bytes | str | None) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""
