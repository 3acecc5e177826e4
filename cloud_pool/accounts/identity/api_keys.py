"""API keys that a tenant's administrators make. Redis has the SHA-256 of each; every gateway has a copy of all of them.

    causeway:{apikeys}:keys    hash: id -> key, JSON
    causeway:{apikeys}:nonce   another one after each change
    causeway:{apikeys}:used    hash: id -> Unix time of the last use, by the minute

1. The copy is read again every `revocations_refresh_s` if the nonce has changed. While Redis is unavailable it is used
   as long as the copy of the revocations.
2. A deleted key is revoked, too: an older replica that is promoted does not bring it back.
3. After a rotation the secret before is accepted until the overlap ends.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Annotated, Final, Literal

import anyio
import msgspec
import redis.asyncio
from msgspec import Meta
from redis.exceptions import RedisError

from causeway_server.router.errors import (
    AuthenticationFailed,
    IdentityUnavailable,
    InvalidRequest,
    NotFound,
    PermissionDenied,
)
from causeway_server.router.serving.issuers.config import ClaimName

from ...core.principal import Grants, Principal
from ...redis.connect import client_fault
from ...redis.keys import load_script
from .config import IdentityConfig
from .revocation import revoke_token

PREFIX: Final = "cwk_"
"""Beginning of every key, by which scanners for secrets find it."""
_KEYS, _NONCE, _USED = (f"causeway:{{apikeys}}:{name}" for name in ("keys", "nonce", "used"))
CHANGE_SCRIPT: Final = load_script(f"{__package__}.lua", "change_api_key")
DAY_S: Final = 86400.0
_LISTS: Final = ("models", "modalities", "regions")
_READ_S = 10.0
log = logging.getLogger(__name__)


class NewApiKey(Grants, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of a request for a key, with its grants.

    Attributes:
        name: Its name in audit log and lists.
        usd_per_day: Its part of the tenant's budget per UTC day; 0: all of it. Only without the scope `jobs`.
    """

    name: ClaimName
    scopes: Annotated[tuple[Literal["chat", "jobs"], ...], Meta(min_length=1)] = ("chat",)
    expires_in_s: Annotated[float, Meta(ge=60)] = 90 * DAY_S
    usd_per_day: Annotated[float, Meta(ge=0)] = 0.0


class Rotation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a rotation. `overlap_s`: how long the secret before is accepted."""

    overlap_s: Annotated[float, Meta(ge=0, le=30 * DAY_S)] = DAY_S
    expires_in_s: Annotated[float, Meta(ge=60)] = 90 * DAY_S


class Secret(msgspec.Struct, frozen=True):
    """A digest, and when it ends (Unix s)."""

    sha256: str
    until: float


class ApiKey(msgspec.Struct, frozen=True):
    """A key. `secrets`: the newest first. `made`: when that was made (Unix s)."""

    id: str
    tenant: str
    name: str
    scopes: tuple[str, ...]
    grants: Grants
    made: float
    secrets: tuple[Secret, ...]
    usd_per_day: float = 0.0

    @property
    def principal(self) -> Principal:
        """The caller with this key: a device of its own, which keeps its jobs and files over rotations."""
        device = f"{self.name[:40]}.{self.id}"
        return Principal(
            self.tenant, device, frozenset(self.scopes), self.grants, self.id, self.made, usd_per_day=self.usd_per_day
        )


class ApiKeyStore:
    """The keys in Redis. `most`: maximum keys of one tenant; `wall_clock`: Unix time in seconds."""

    def __init__(
        self, client: redis.asyncio.Redis, config: IdentityConfig, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self.client = client
        self._config = config
        self._now = wall_clock

    async def create(self, tenant: str, asked: NewApiKey, own: Grants) -> tuple[ApiKey, str]:
        """Make a key, and return it with its secret. `own`: grants that it may not exceed.

        Raises:
            InvalidRequest: The tenant has too many keys, or the key cannot have these values.
            PermissionDenied: The key would exceed `own`.
            RedisError: Redis does not answer.
        """
        if asked.usd_per_day and "jobs" in asked.scopes:
            raise InvalidRequest(
                "A key with a budget (`usd_per_day`) cannot have the scope `jobs`, because a job runs later than the "
                "request that submits it.",
                param="scopes",
            )
        if len(await self.list(tenant)) >= (most := self._config.api_keys.max_per_tenant):
            raise InvalidRequest(f"The tenant has {most} API keys. Delete one first.", param="name")
        secret, now = _new_secret(), self._now()
        grants = _within(asked, own)
        key = ApiKey(
            secrets.token_hex(8),
            tenant,
            asked.name,
            asked.scopes,
            grants,
            now,
            (Secret(_sha256(secret), now + self._lifetime_s(asked.expires_in_s)),),
            asked.usd_per_day,
        )
        await self._change(key.id, b"", msgspec.json.encode(key))
        return key, secret

    async def list(self, tenant: str) -> list[ApiKey]:
        """Return a tenant's keys, the oldest first. Raises RedisError."""
        rows = await self.client.hgetall(_KEYS)
        found = [key for key in map(_decoded, rows.values()) if key is not None and key.tenant == tenant]
        return sorted(found, key=lambda key: (key.made, key.id))

    async def last_used(self) -> dict[str, int]:
        """Return when keys were used last, Unix seconds by id. Raises RedisError."""
        return {_text(name): int(at) for name, at in (await self.client.hgetall(_USED)).items()}

    async def rotate(self, tenant: str, key_id: str, asked: Rotation, own: Grants) -> tuple[ApiKey, str]:
        """Give a key another secret, and return both. `own`: grants that the key may not exceed.

        Raises PermissionDenied if the key exceeds `own` (its secret would give more), and the errors of `delete`.
        """
        key, stored = await self._find(tenant, key_id)
        if _within(key.grants, own) != key.grants:
            raise PermissionDenied("This API key grants more than your token does, so you cannot rotate the key.")
        secret, now = _new_secret(), self._now()
        old = msgspec.structs.replace(key.secrets[0], until=min(key.secrets[0].until, now + asked.overlap_s))
        new = Secret(_sha256(secret), now + self._lifetime_s(asked.expires_in_s))
        key = msgspec.structs.replace(key, made=now, secrets=(new, old))
        await self._change(key_id, stored, msgspec.json.encode(key))
        return key, secret

    async def delete(self, tenant: str, key_id: str) -> None:
        """Delete a key. Raises NotFound, InvalidRequest or RedisError."""
        key, stored = await self._find(tenant, key_id)
        await revoke_token(self.client, key_id, max(each.until for each in key.secrets), self._now())  # (2)
        await self._change(key_id, stored, b"")

    async def _find(self, tenant: str, key_id: str) -> tuple[ApiKey, bytes | str]:
        stored = await self.client.hget(_KEYS, key_id)
        key = None if stored is None else _decoded(stored)
        if stored is None or key is None or key.tenant != tenant:
            raise NotFound(f"There is no API key {key_id[:64]!r}.")
        return key, stored

    async def _change(self, key_id: str, before: bytes | str, after: bytes) -> None:
        keys = (_KEYS, _NONCE, _USED)
        if not await self.client.eval(CHANGE_SCRIPT, len(keys), *keys, key_id, before, after, secrets.token_hex(8)):
            raise InvalidRequest("Another request changed the API key at the same time. Send your request again.")

    def _lifetime_s(self, asked: float) -> float:
        if asked > (most := self._config.max_lifetime_s):
            raise InvalidRequest(f"The lifetime of an API key may be at most {most:g} s.", param="expires_in_s")
        return asked


class ApiKeys:
    """A gateway's copy of the keys. `last_error`: why the last reading failed; "" if it did not."""

    def __init__(
        self, client: redis.asyncio.Redis, config: IdentityConfig, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self.store = ApiKeyStore(client, config, wall_clock)
        self._config = config
        self._now = wall_clock
        self._by_digest: dict[str, tuple[Principal, float]] = {}  # and when it ends
        self._nonce: bytes | str | None = None
        self._is_read = False
        self._used: dict[str, int] = {}  # to the minute
        self._told: dict[str, int] = {}
        self.last_error = ""

    def principal(self, secret: str) -> Principal:
        """Return the caller with this key. Raises AuthenticationFailed or IdentityUnavailable."""
        if not self._is_read:
            raise IdentityUnavailable("This gateway has not read the API keys yet.", retry_after_s=5.0)
        principal, until = self._by_digest.get(_sha256(secret), (None, 0.0))
        if principal is None:
            raise AuthenticationFailed("This API key is unknown.")
        now = self._now()
        if not principal.issued - self._config.clock_skew_s <= now < until:
            raise AuthenticationFailed("This API key has expired, or the clock of this gateway is wrong.")
        self._used[principal.token_id] = int(now // 60) * 60
        return principal

    async def watch(self) -> None:
        """Read the keys again every `revocations_refresh_s`, until cancelled."""
        while True:
            await self.refresh()
            await anyio.sleep(self._config.revocations_refresh_s)

    async def refresh(self) -> None:
        """Read the keys if they have changed, and write when they were used. A failure is kept in `last_error`."""
        client = self.store.client
        try:
            with anyio.fail_after(_READ_S):
                nonce = await client.get(_NONCE)
                if nonce != self._nonce or not self._is_read:
                    self._use((await client.hgetall(_KEYS)).values())
                    self._nonce, self._is_read = nonce, True
                await self._tell()
        except (RedisError, OSError, TimeoutError) as error:
            if not self.last_error:
                log.warning("The API keys cannot be read: %s", client_fault(error, client))
            self.last_error = client_fault(error, client)
            return
        self.last_error = ""

    def _use(self, rows: Iterable[bytes | str]) -> None:
        found = [key for key in map(_decoded, rows) if key is not None]
        self._by_digest = {each.sha256: (key.principal, each.until) for key in found for each in key.secrets}

    async def _tell(self) -> None:
        """Write when keys were used, where the minute is another one."""
        used = [(name, at) for name, at in self._used.items() if self._told.get(name) != at]
        if used:
            await self.store.client.hset(_USED, items=[each for pair in used for each in pair])
            self._told = dict(self._used)


def _within(asked: Grants, own: Grants) -> Grants:
    """Return a key's grants, with at most its maker's priority. Raises PermissionDenied beyond its maker's."""
    lists: dict[str, tuple[str, ...] | None] = {}
    for name in _LISTS:
        wanted, allowed = getattr(asked, name), getattr(own, name)
        if wanted is not None and allowed is not None and (beyond := set(wanted) - set(allowed)):
            raise PermissionDenied(f"Your token does not grant {', '.join(sorted(beyond))}.", param=name)
        lists[name] = allowed if wanted is None else wanted
    critical = asked.critical and own.critical
    return msgspec.convert({"priority": own.bounded_priority(asked.priority), "critical": critical, **lists}, Grants)


def _new_secret() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def _sha256(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _decoded(stored: bytes | str) -> ApiKey | None:
    """Return a key; None for one that cannot be read, which is not accepted."""
    try:
        return msgspec.json.decode(stored, type=ApiKey)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        log.error("An API key in Redis cannot be read, and is not accepted: %s", type(error).__name__)
        return None
