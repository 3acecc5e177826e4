"""The response cache: exact answers in memory, backed by SQLite. Both are LRU and bounded in bytes.

An entry has an age, not an expiry time: the policy decides at lookup whether it is fresh. In memory the age is measured
by the monotonic clock. On disk it is measured by the monotonic clock within one boot, else by the wall clock; an entry
whose age would be negative is not used.

Private answers stay in memory (`durable=False`); their key includes the client, so that no other client finds them. In
memory an answer is compiled (`router.openai.CachedAnswer`), so that a hit only joins a few byte strings; on disk it is
stored as its chunks.
"""

from __future__ import annotations

import functools
import sqlite3
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import msgspec

from causeway_server.router.documents.data import text_of
from causeway_server.router.errors import StreamBroken
from causeway_server.router.openai.answer import CachedAnswer, decode_chunks, encode_chunks
from causeway_server.router.serving.at_rest.state_keys import StateKeys
from causeway_server.router.types import Embeddings, Request

from ..clock import Clock
from .background_sqlite import BackgroundSqlite, Row, SqliteStore, Write, evict

FILE = "cache-2.sqlite"  # the number is the schema version: another version starts a new file
_SCHEMA = text_of(__package__, "cache.sql")
_PUT = "INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?, ?, ?)"
_GET = "SELECT opened(value, 'answers', key), owner, boot, monotonic_s, unix_s FROM answers WHERE key = keyed(?)"
_ERASE = "DELETE FROM answers WHERE keyed(?) IN ('', owner) RETURNING key"
_TOUCH = "UPDATE answers SET used_unix_s = ? WHERE key = keyed(?)"
_EVICT = "DELETE FROM answers WHERE key IN (SELECT key FROM answers ORDER BY used_unix_s LIMIT 64)"
_ENTRY_OVERHEAD_BYTES = 256  # key, table slot and entry around the answer
_FLOAT_BYTES = 32
_DISK_TIMEOUT_S = 0.05  # a longer disk read would take longer than a target's answer
_SLOW_DISK_S = 5.0  # pause of disk reads after a timeout
_MAX_ENTRY_FRACTION = 8  # an entry may fill at most 1/this of the memory


class StoredAnswer(msgspec.Struct, frozen=True):
    """A complete, successful answer, with the target and model that made it."""

    target: str
    model: str
    body: CachedAnswer | Embeddings

    @property
    def size_bytes(self) -> int:
        if isinstance(self.body, CachedAnswer):
            return self.body.size_bytes
        return _FLOAT_BYTES * sum(map(len, self.body.vectors))


class CacheHit(msgspec.Struct, frozen=True):
    answer: StoredAnswer
    age_s: float
    similarity: float | None = None  # similarity of this question to the one that was answered; None: the same request


class _MemoryEntry(NamedTuple):
    answer: StoredAnswer
    stored_at: float  # monotonic seconds
    owner: str  # client that made it, or its keyed digest where it was read from the disk


class _DiskAnswer(msgspec.Struct, frozen=True, array_like=True):
    target: str
    model: str
    chunks: bytes = b""
    embeddings: Embeddings | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_DiskAnswer)


class _AnswerFile(BackgroundSqlite):
    def _prepare(self, database: sqlite3.Connection) -> None:
        super()._prepare(database)
        if self.keys is not None and database.execute("SELECT 1 FROM answers LIMIT 1").fetchone():
            self.keys.prepare()  # reads wait only a moment


class AnswerCache(SqliteStore):
    """The response cache of one daemon, with at most `memory_bytes` and `disk_bytes` (0: memory only, as without a
    `directory`, the state folder). `retry_s`, `keys`: as for `BackgroundSqlite`.
    """

    def __init__(
        self,
        *,
        memory_bytes: int,
        disk_bytes: int,
        directory: Path | None,
        clock: Clock,
        retry_s: float = 30.0,
        keys: StateKeys | None = None,
    ) -> None:
        self._clock = clock
        self._memory_limit_bytes = memory_bytes
        self._disk_limit_bytes = disk_bytes
        self._memory: OrderedDict[bytes, _MemoryEntry] = OrderedDict()
        self.memory_bytes = 0  # bytes of the entries in memory
        self._disk_slow_until = float("-inf")  # end of the pause of disk reads, after a timeout
        database = None
        if directory is not None and disk_bytes > 0:
            database = _AnswerFile(directory / FILE, _SCHEMA, trim=self._trim_disk, retry_s=retry_s, keys=keys)
        super().__init__(database)

    def __len__(self) -> int:
        """Return the number of entries in memory."""
        return len(self._memory)

    # --- lookup ------------------------------------------------------------------------------------------------------

    def lookup_memory(self, key: bytes) -> CacheHit | None:
        """Look up a key in memory."""
        entry = self._memory.get(key)
        if entry is None:
            return None
        self._memory.move_to_end(key)
        return CacheHit(entry.answer, self._clock.monotonic() - entry.stored_at)

    async def lookup_disk(self, key: bytes, request: Request) -> CacheHit | None:
        """Look up a key on disk, after `lookup_memory` found no entry, and copy a hit to memory."""
        if self.database is None or self._clock.monotonic() < self._disk_slow_until:
            return None
        try:
            rows = await self.database.read(_GET, (key,), timeout_s=_DISK_TIMEOUT_S)
        except TimeoutError:
            self._disk_slow_until = self._clock.monotonic() + _SLOW_DISK_S
            return None
        if not rows:
            return self.lookup_memory(key)  # an identical request may have stored its answer meanwhile
        value, owner, *stored_at = rows[0]
        age_s = self._age_s(tuple(stored_at))
        if age_s is None or not isinstance(value, bytes):
            return None
        answer = _decode_answer(request, value)
        if answer is None:
            return None
        self._remember(key, _MemoryEntry(answer, self._clock.monotonic() - age_s, str(owner)))
        self.database.write(Write(_TOUCH, (self._clock.unix(), key)))
        return CacheHit(answer, age_s)

    def _age_s(self, stored_at: Row) -> float | None:
        """Return the age in seconds by (1) this boot's clock, (2) the wall clock; None if negative (3)."""
        boot, monotonic_s, unix_s = stored_at
        if not isinstance(monotonic_s, float) or not isinstance(unix_s, float):
            return None
        if boot and boot == self._clock.boot_id:
            age_s = self._clock.monotonic() - monotonic_s  # (1)
        else:
            age_s = self._clock.unix() - unix_s  # (2)
        return age_s if age_s >= 0.0 else None  # (3)

    # --- store -------------------------------------------------------------------------------------------------------

    def put(self, key: bytes, answer: StoredAnswer, *, owner: str = "", durable: bool = True) -> None:
        """Store an answer to a request of `owner`, unless it is too large; on disk, too, if `durable`."""
        if answer.size_bytes > self._memory_limit_bytes // _MAX_ENTRY_FRACTION:
            return
        now = self._clock.monotonic()
        self._remember(key, _MemoryEntry(answer, now, owner))
        if durable and self.database is not None:
            value, unix = _encode_answer(answer), self._clock.unix()
            row = functools.partial(_row, self.database.keys, key, value, owner, self._clock.boot_id, now, unix, unix)
            self.database.write(Write(_PUT, row, len(value)))

    def _remember(self, key: bytes, entry: _MemoryEntry) -> None:
        self._forget(key)
        self._memory[key] = entry
        self.memory_bytes += _cost_bytes(entry.answer)
        while self.memory_bytes > self._memory_limit_bytes:
            self._forget(next(iter(self._memory)))

    def _forget(self, key: bytes) -> None:
        removed = self._memory.pop(key, None)
        if removed is not None:
            self.memory_bytes -= _cost_bytes(removed.answer)

    async def erase(self, owner: str) -> int:
        """Erase the answers to a client's requests ("": of all); return their number. Raises JobStoreUnavailable."""
        erased, names = set[object](), {owner}
        keys = None if self.database is None else self.database.keys
        if self.database is not None and keys is not None:
            erased = {row[0] for row in await self.database.erase(_ERASE, (owner,))}
            names.add(str(keys.keyed(owner)))
        for key in [key for key, entry in self._memory.items() if not owner or entry.owner in names]:
            self._forget(key)
            erased.add(key if keys is None else keys.keyed(key))
        return len(erased)

    def _trim_disk(self, database: sqlite3.Connection) -> None:
        evict(database, self._disk_limit_bytes, _EVICT)


def _row(keys: StateKeys | None, key: bytes, value: bytes, owner: str, *times: str | float) -> Row:
    """Return the row of an answer, encrypted here: for functions in SQL each row would wait for the interpreter."""
    assert keys is not None
    digest = keys.keyed(key)
    return (digest, keys.seal(value, "answers", str(digest)), *times, keys.keyed(owner))


def _cost_bytes(answer: StoredAnswer) -> int:
    return answer.size_bytes + _ENTRY_OVERHEAD_BYTES


def _encode_answer(answer: StoredAnswer) -> bytes:
    if isinstance(answer.body, CachedAnswer):
        return _encoder.encode(_DiskAnswer(answer.target, answer.model, chunks=encode_chunks(answer.body.chunks)))
    return _encoder.encode(_DiskAnswer(answer.target, answer.model, embeddings=answer.body))


def _decode_answer(request: Request, value: bytes) -> StoredAnswer | None:
    """Decode an entry. Return None for a corrupt one or one of another version."""
    try:
        stored = _decoder.decode(value)
        if stored.embeddings is not None:
            return StoredAnswer(stored.target, stored.model, stored.embeddings)
        return StoredAnswer(
            stored.target, stored.model, CachedAnswer(request, stored.model, decode_chunks(stored.chunks))
        )
    except (msgspec.DecodeError, ValueError, StreamBroken):
        return None
