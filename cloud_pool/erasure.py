"""The erasure of all data of a subject, kind by kind, until no more is found. Each step can be repeated.

The receipt names the subject and counts what was erased; it is signed with an Ed25519 key of `causeway-cloud keys new`.

There is no complete index of a tenant's jobs, so every key is inspected (SCAN), page by page.

Erased items are counted in Redis, beside the jobs, so that the next run continues an interrupted one and its receipt
has the counts of both. An interruption may leave 32 erased items uncounted; items that still exist are never counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from typing import Final, Protocol, cast

import jwt
import msgspec
import redis.asyncio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from redis.exceptions import RedisError

from causeway_server.router.decision.sessions import client_of
from causeway_server.router.errors import CausewayError, ConfigError, JobStoreUnavailable

from .accounts.identity.api_keys import ApiKeyStore
from .accounts.identity.config import IdentityConfig
from .accounts.identity.key_set import Jwks, parse_keys, public_jwk
from .cache.config import CacheConfig
from .core.subject import ErasureSubject
from .degradation.tier_sessions import list_of
from .redis.config import RedisAddress, shown_address
from .redis.connect import open_redis, redis_fault
from .storage.batch_store import output_file_id
from .storage.config import JobsConfig, with_shared_redis
from .storage.record import user_digest
from .storage.redis_client import JobStoreRefused, RedisClient, as_fields, as_int, as_list, as_text
from .storage.stores import JobStores

_ALGORITHM = "EdDSA"
_TYPE = "causeway-erasure"  # no token has it


class Retained(msgspec.Struct, frozen=True):
    """A kind of data that is not erased, with the reason."""

    what: str
    why: str


class Receipt(msgspec.Struct, frozen=True):
    """The receipt of an erasure. Times are UTC."""

    subject: ErasureSubject
    started: str
    finished: str
    resumed: bool  # whether an earlier run was interrupted; the counts are of all runs
    erased: dict[str, int]  # number of erased items by kind
    left: list[Retained]


class SignedReceipt(msgspec.Struct, frozen=True):
    """The answer of an erasure."""

    receipt: Receipt
    jws: str  # the same receipt, signed: compact JWS, RFC 7515


def sign(receipt: Receipt, key: Ed25519PrivateKey) -> bytes:
    """Return the signed receipt as JSON."""
    headers = {"kid": public_jwk(key.public_key()).kid, "typ": _TYPE}
    jws = jwt.PyJWS().encode(msgspec.json.encode(receipt), key, _ALGORITHM, headers)
    return msgspec.json.format(msgspec.json.encode(SignedReceipt(receipt, jws))) + b"\n"


def verify(data: bytes, keys: Jwks) -> Receipt:
    """Return the receipt if it is unchanged and signed by one of `keys`. Raises ConfigError."""
    try:
        signed = msgspec.json.decode(data, type=SignedReceipt)
        header = jwt.get_unverified_header(signed.jws)
        key = parse_keys(keys, "the key set").get(str(header.get("kid")))
        if key is None or header.get("typ") != _TYPE:
            raise ConfigError(f"The key {header.get('kid')}, which signed this receipt, is not in the key set.")
        payload = jwt.PyJWS().decode(signed.jws, key, [_ALGORITHM])
        receipt = msgspec.json.decode(payload, type=Receipt)
    except (jwt.InvalidTokenError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"The file is not a receipt, or was modified: {error}") from error
    if receipt != signed.receipt:
        raise ConfigError("The receipt was modified: its signature belongs to another receipt.")
    return receipt


_PAGE = 1000
_GLOB = str.maketrans({each: f"\\{each}" for each in "*?[]\\"})


class ErasedKind(Protocol):
    """A kind of data that can be found and erased."""

    @property
    def name(self) -> str:
        """Name of the kind in the receipt."""

    def find(self, subject: ErasureSubject) -> AsyncIterator[str]:
        """Yield the names of the subject's items. Raises JobStoreUnavailable or RedisError."""

    async def erase(self, name: str) -> bool:
        """Erase one item. Returns False if it no longer existed. Raises JobStoreUnavailable or RedisError."""


class _JobKeys(msgspec.Struct):
    """Keys below the job prefix that begin with `kind:`: records whose fields name their owner."""

    stores: JobStores
    name: str  # name in the receipt
    kind: str = ""
    fields: tuple[str, ...] = ("owner",)  # fields of a record, its owner first
    script: str = ""  # script that erases a record

    async def _scan(self) -> AsyncIterator[list[str]]:
        """Yield pages of key names without the prefix and kind."""
        database, cursor = self.stores.database, "0"
        prefix = database.key(self.kind, "")
        while True:
            reply = as_list(
                await database.command("SCAN", cursor, "MATCH", f"{prefix.translate(_GLOB)}*", "COUNT", _PAGE)
            )
            cursor = as_text(reply[0])
            yield [as_text(key).removeprefix(prefix) for key in as_list(reply[1])]
            if cursor == "0":
                return

    async def _records(self) -> AsyncIterator[tuple[str, list[str]]]:
        """Yield the names of records, with their fields."""
        database = self.stores.database
        async for page in self._scan():
            names = [name for name in page if ":" not in name]
            rows = await database.commands([("HMGET", database.key(self.kind, name), *self.fields) for name in names])
            for name, row in zip(names, rows, strict=True):
                yield name, [as_text(value) for value in as_list(row)]

    async def find(self, subject: ErasureSubject) -> AsyncIterator[str]:
        async for name, (owner, *_) in self._records():
            if subject.owns(owner):
                yield name

    async def erase(self, name: str) -> bool:
        return bool(await self.stores.database.run(self.script, name))


class Batches(_JobKeys):
    """Batches, which are erased first: an open batch would create further jobs and files."""

    async def erase(self, name: str) -> bool:
        erased = await super().erase(name)
        for part in ("output", "errors"):  # of a worker that writes them just now
            await self.stores.contents.current.delete(output_file_id(name, part))
        return erased


class Jobs(_JobKeys):
    """Jobs with request, result, text, events, idempotency key and dead letter. Batches belong to no user."""

    async def find(self, subject: ErasureSubject) -> AsyncIterator[str]:
        wanted = user_digest(subject.tenant, subject.user)
        async for name, (owner, user, batch) in self._records():
            is_users = wanted and user == wanted and not batch and owner.partition("/")[0] == subject.tenant
            if is_users or subject.owns(owner):
                yield name


class Responses(_JobKeys):
    """Stored responses, and conversations with all their turns, also if only one of them is the user's."""

    async def find(self, subject: ErasureSubject) -> AsyncIterator[str]:
        wanted = user_digest(subject.tenant, subject.user)
        self.fields = ("owner", f"u:{wanted}")
        async for name, (owner, is_of_user) in self._records():
            is_users = wanted and is_of_user and owner.partition("/")[0] == subject.tenant
            if is_users or subject.owns(owner):
                yield name

    async def erase(self, name: str) -> bool:
        return bool(await self.stores.database.run(self.script, "", name, name))


class Files(_JobKeys):
    """Files with their content."""

    async def erase(self, name: str) -> bool:
        return await self.stores.files.erase(name)


class OwnerKeys(_JobKeys):
    """Keys that name an owner, whose values are not records: `kind:<owner>`, or `kind:<owner>:…`."""

    async def find(self, subject: ErasureSubject) -> AsyncIterator[str]:
        async for page in self._scan():
            for name in page:
                if subject.owns(name.partition(":")[0]):
                    yield name

    async def erase(self, name: str) -> bool:
        return bool(await self.stores.database.command("UNLINK", self.stores.database.key(self.kind, name)))


class DeadLetters(_JobKeys):
    """Dead letters whose record has expired; an item's name is its id in the stream."""

    async def find(self, subject: ErasureSubject) -> AsyncIterator[str]:
        for entry in as_list(await self.stores.database.command("XRANGE", self.stores.database.key("dead"), "-", "+")):
            entry_id, fields = as_list(entry)
            if subject.owns(as_text(as_fields(fields).get("owner"))):
                yield as_text(entry_id)

    async def erase(self, name: str) -> bool:
        return bool(await self.stores.database.command("XDEL", self.stores.database.key("dead"), name))


class PendingUsage(_JobKeys):
    """Bills that no worker has added to the tenant's usage yet, with fields `tenant|day|…`."""

    async def find(self, subject: ErasureSubject) -> AsyncIterator[str]:
        for field in as_list(await self.stores.database.command("HKEYS", self.stores.database.key("usage"))):
            if not (subject.device or subject.user) and as_text(field).partition("|")[0] == subject.tenant:
                yield as_text(field)

    async def erase(self, name: str) -> bool:
        return bool(await self.stores.database.command("HDEL", self.stores.database.key("usage"), name))


class TenantMarks(_JobKeys):
    """A tenant's name in the queues' records of turns and limits."""

    async def find(self, subject: ErasureSubject) -> AsyncIterator[str]:
        if subject.device or subject.user:
            return
        database, names = self.stores.database, ["blocked", "trials"]
        async for page in self._scan():
            names += [f"tags:{name}" for name in page]
        scores = await database.commands([("ZSCORE", database.key(name), subject.tenant) for name in names])
        for name, score in zip(names, scores, strict=True):
            if score is not None:
                yield f"{subject.tenant} {name}"

    async def erase(self, name: str) -> bool:
        tenant, _, key = name.partition(" ")
        return bool(await self.stores.database.command("ZREM", self.stores.database.key(key), tenant))


class _SharedKeys(msgspec.Struct):
    """Keys of the Redis that gateways share, which may be a cluster."""

    client: redis.asyncio.Redis
    name: str  # name in the receipt

    async def _scan(self, pattern: str) -> AsyncIterator[str]:
        async for key in self.client.scan_iter(match=pattern, count=_PAGE):
            yield cast("bytes", key).decode("utf-8", "surrogateescape")

    async def erase(self, name: str) -> bool:
        return bool(await self.client.unlink(name.encode("utf-8", "surrogateescape")))


class TenantUsage(_SharedKeys):
    """A tenant's usage by day, rates and reservations; they do not belong to a single device or user."""

    async def find(self, subject: ErasureSubject) -> AsyncIterator[str]:
        if subject.device or subject.user:
            return
        tenant = subject.tenant.translate(_GLOB)
        for bucket in (tenant, f"{tenant}/*"):
            async for key in self._scan(f"causeway:tenant:{{{bucket}}}:*"):
                yield key


class CachedAnswers(_SharedKeys):
    """Answers in the shared cache that were made for the subject."""

    prefix: str  # prefix of its keys

    async def find(self, subject: ErasureSubject) -> AsyncIterator[str]:
        async for key in self._scan(f"{self.prefix.translate(_GLOB)}:{{*}}:entry"):
            marks = cast("bytes | None", await self.client.hget(key, "of"))
            if marks is None or subject.digest.encode() in marks:  # an older version wrote no marks
                yield key


class SessionStates(_SharedKeys):
    """Sessions of a tenant or a device."""

    async def find(self, subject: ErasureSubject) -> AsyncIterator[str]:
        if subject.user:
            return
        owner = client_of(f"{subject.tenant}/{subject.device}").hex() if subject.device else ""
        async for key in self._scan(f"{list_of(subject.tenant)}{owner and f':{owner}'}*"):
            yield key

    async def erase(self, name: str) -> bool:
        listed, _, state = name.rpartition(":")
        if state[:1] != "{":
            await self.client.zrem(listed, state)
        return await super().erase(name)


class TenantApiKeys(_SharedKeys):
    """A tenant's API keys, which are refused from then on."""

    identity: IdentityConfig

    async def find(self, subject: ErasureSubject) -> AsyncIterator[str]:
        if not (subject.device or subject.user):
            for key in await ApiKeyStore(self.client, self.identity).list(subject.tenant):
                yield f"{key.tenant} {key.id}"

    async def erase(self, name: str) -> bool:
        await ApiKeyStore(self.client, self.identity).delete(*name.split(" "))
        return True


def job_kinds(stores: JobStores) -> tuple[ErasedKind, ...]:
    """Return the kinds of the job store, in the order in which they are erased."""
    return (
        Batches(stores, "batches", "batch", script="erase_batch"),
        Jobs(stores, "jobs", "job", ("owner", "user", "batch"), script="erase_job"),
        Responses(stores, "responses", "response", script="response_delete"),
        Files(stores, "files", "file"),
        DeadLetters(stores, "dead_letters"),
        _JobKeys(stores, "webhook_deliveries", "webhook", script="webhook_erase"),
        PendingUsage(stores, "pending_usage"),
        TenantMarks(stores, "queue_marks", "tags"),
        OwnerKeys(stores, "idempotency_keys", "idempotency"),
        OwnerKeys(stores, "webhook_secrets", "webhook_secret"),
        OwnerKeys(stores, "disabled_webhooks", "webhook_disabled"),
        OwnerKeys(stores, "job_lists", "jobs"),
        OwnerKeys(stores, "file_lists", "files"),
        OwnerKeys(stores, "batch_lists", "batches"),
    )


def gateway_kinds(
    shared: redis.asyncio.Redis, cache: redis.asyncio.Redis, cache_prefix: str, identity: IdentityConfig
) -> tuple[ErasedKind, ...]:
    """Return the kinds of the gateways' Redis and of the shared cache."""
    return (
        TenantApiKeys(shared, "api_keys", identity),
        TenantUsage(shared, "usage"),
        SessionStates(shared, "sessions"),
        CachedAnswers(cache, "cached_answers", cache_prefix),
    )


_ALWAYS_LEFT: Final = (
    Retained("backups, and copies outside Causeway", "Causeway does not know them: delete them, or let them expire"),
    Retained("devices, upstreams and brokers", "erase there what they keep"),
    Retained("audit files, logs and traces", "ids and times, no content: they expire as you rotate these files"),
    Retained("egress ledger, counts of trials and feedback", "they have no content and name no client"),
    Retained("revocations of tokens", "kept, so that no revoked token works again"),
    Retained("effects of streams", "keys are one-way digests: they expire after `streams.effect_ttl_s`"),
    Retained("answers in progress", "cached when they end, until `cache.ttl_s` and `cache.stale_if_error_s` are over"),
    Retained("memory of gateways", "facts of parts for `parts.fact_cache_ttl_s`, digests of sessions as in Redis"),
)


def retained(subject: ErasureSubject) -> list[Retained]:
    """Return what an erasure leaves."""
    left = list(_ALWAYS_LEFT)
    if subject.device or subject.user:
        left.append(Retained("usage", "it is counted by tenant, tier and day, and an API key's budget by its id"))
    if subject.user:
        left.append(Retained("files and batches", "a file has lines of many users: erase the device"))
        left.append(Retained("sessions", "digests without content, until `degradation.sessions.ttl_s`"))
    return left


_PASSES: Final = 3
_AT_ONCE: Final = 32
_PROGRESS_TTL_MS: Final = 30 * 86_400_000
_STARTED = "started"


class ErasureConflict(CausewayError, status=409, code="erasure_incomplete"):
    """New data of the subject arrives while it is erased."""


class Erasure:
    """An erasure: `kinds` are erased in this order; `database` stores the progress."""

    def __init__(self, database: RedisClient, kinds: Sequence[ErasedKind]) -> None:
        self._db = database
        self.kinds = kinds

    async def count(self, subject: ErasureSubject) -> dict[str, int]:
        """Return the number of items of each kind, without changing anything."""
        return {kind.name: len({name async for name in kind.find(subject)}) for kind in self.kinds}

    async def erase(self, subject: ErasureSubject) -> Receipt:
        """Erase everything and return the receipt, whose counts are kept until `forget`.

        Raises ErasureConflict if the subject still gets new data (what was found before is erased), JobStoreUnavailable
        if a store does not answer (a later call continues).
        """
        progress = self._db.key("erasure", subject.digest)
        began = await self._db.now_ms()
        is_new = as_int(await self._db.command("HSETNX", progress, _STARTED, began))
        await self._db.command("PEXPIRE", progress, _PROGRESS_TTL_MS)
        for _ in range(_PASSES):
            if not await self._pass(subject, progress):
                break
        else:
            raise ErasureConflict(
                f"There is still new data of {subject.name}. Stop the programs that write it, or revoke their tokens, "
                "then erase again."
            )
        await self._db.replicate()
        await self._db.command("PEXPIRE", progress, _PROGRESS_TTL_MS)  # another run may have ended, and removed it
        counts = {name: int(value) for name, value in as_fields(await self._db.command("HGETALL", progress)).items()}
        return Receipt(
            subject=subject,
            started=_time(counts.pop(_STARTED, began)),
            finished=_time(await self._db.now_ms()),
            resumed=not is_new,
            erased=counts,
            left=[*retained(subject), await self._rewrite()],
        )

    async def forget(self, subject: ErasureSubject) -> None:
        """Delete the progress of an erasure whose receipt has been stored."""
        await self._db.command("UNLINK", self._db.key("erasure", subject.digest))

    async def _pass(self, subject: ErasureSubject, progress: str) -> int:
        """Erase the data that is found, and return the number of items."""
        total = 0
        for kind in self.kinds:
            names, erased = [], 0
            async for name in kind.find(subject):
                names.append(name)
                if len(names) == _AT_ONCE:
                    erased += await self._erase(kind, names, progress)
                    names.clear()
            erased += await self._erase(kind, names, progress)
            total += erased
        return total

    async def _erase(self, kind: ErasedKind, names: Sequence[str], progress: str) -> int:
        """Erase these items concurrently, so that Redis writes them to disk together."""

        async def erase_one(name: str) -> bool:
            erased = await kind.erase(name)
            if erased:
                await self._db.command("HINCRBY", progress, kind.name, 1)
            return erased

        results = await asyncio.gather(*map(erase_one, names), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results.count(True)

    async def _rewrite(self) -> Retained:
        """Let Redis rewrite its files without the erased data, and return the copies that remain."""
        what = "append-only files and snapshots of Redis"
        try:
            await self._db.command("BGREWRITEAOF")
        except JobStoreRefused:
            return Retained(
                what, "until Redis rewrites them: run BGREWRITEAOF, which this user is not permitted to run"
            )
        return Retained(what, "until the rewrite that has begun is over; you must delete copies of them yourself")


def _time(unix_ms: int) -> str:
    return datetime.fromtimestamp(unix_ms / 1000.0, UTC).isoformat(timespec="milliseconds")


class StoreFailed(CausewayError):
    """A store does not answer, or answers with an error."""


@asynccontextmanager
async def opened(
    jobs: JobsConfig, redis_of_all: RedisAddress, cache: CacheConfig, identity: IdentityConfig
) -> AsyncIterator[Erasure]:
    """Open these sections' stores for a `with` block. Raises ConfigError (no Redis of jobs), StoreFailed."""
    settings = with_shared_redis(jobs, redis_of_all)
    if not settings.redis:
        reason = "Name the Redis of jobs, which stores the progress (--redis or --config); it must not be a cluster."
        raise ConfigError(reason, where="jobs.redis")
    shared = redis_of_all or settings.redis
    addresses = {"redis": shared, "cache.redis": cache.redis or shared}
    async with AsyncExitStack() as closing:
        stores = JobStores.open(settings)
        closing.push_async_callback(stores.close)
        clients = [open_redis(address, where) for where, address in addresses.items()]
        for client in clients:
            closing.push_async_callback(client.aclose)
        of_gateways = gateway_kinds(clients[0], clients[1], cache.key_prefix, identity)
        try:
            await stores.database.ensure_layout()
            yield Erasure(stores.database, (*job_kinds(stores), *of_gateways))
        except JobStoreUnavailable as error:
            raise StoreFailed(stores.database.explain(error)) from error
        except (RedisError, OSError) as error:
            shown = " or ".join(dict.fromkeys(map(shown_address, addresses.values())))
            raise StoreFailed(redis_fault(error, shown)) from error
