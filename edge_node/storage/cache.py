"""Exact answers, kept in memory and behind it in SQLite; both bounded in bytes, least recently used first to go.

An entry has an age, never an expiry: what is fresh is the policy's business at the time of the lookup. In memory the
age is monotonic. On disk it is monotonic within one boot, else from the wall clock; an entry from the future has no
believable age and is not used.

Private answers stay in memory (`durable=False`); that nobody else can find them is in their key. In memory an answer is
compiled (`router.openai.CachedAnswer`), so that a hit is little more than the joining of a few byte strings; on disk it
is its chunks.
"""

from __future__ import annotations

import sqlite3
from collections import OrderedDict
from pathlib import Path

import msgspec

from router.errors import StreamBroken
from router.openai import CachedAnswer, decode_chunks, encode_chunks
from router.types import Embeddings, Request

from ..clock import Clock
from .background_sqlite import BackgroundSqlite, Row, SqliteStats, Write, used_bytes

FILE = "cache-1.sqlite"  # the number is the schema's: another one starts a fresh file
_SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (
    key BLOB PRIMARY KEY, value BLOB NOT NULL, boot TEXT NOT NULL, monotonic_s REAL NOT NULL, unix_s REAL NOT NULL,
    used_unix_s REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS answers_by_use ON answers (used_unix_s);
"""
_PUT = "INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?, ?)"
_GET = "SELECT value, boot, monotonic_s, unix_s FROM answers WHERE key = ?"
_TOUCH = "UPDATE answers SET used_unix_s = ? WHERE key = ?"
_EVICT = "DELETE FROM answers WHERE key IN (SELECT key FROM answers ORDER BY used_unix_s LIMIT 64)"
_ENTRY_OVERHEAD_BYTES = 256  # the key, its slot, and the entry around the answer
_FLOAT_BYTES = 32
_FETCH_S = 0.05  # nobody waits longer for the disk, for then a target would have answered
_SLOW_S = 5.0
_LARGEST_SHARE = 8  # no entry takes more than this fraction of the memory


class StoredAnswer(msgspec.Struct, frozen=True):
    """A complete, successful answer and who gave it."""

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


class CacheStats(msgspec.Struct, frozen=True):
    entries: int
    memory_bytes: int
    disk: SqliteStats | None


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    """An `Answer` on disk. Which request it answers is in its key."""

    target: str
    model: str
    chunks: bytes = b""
    embeddings: Embeddings | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Stored)


class AnswerCache:
    """`directory` None, or `disk_bytes` 0: memory only."""

    def __init__(
        self, *, memory_bytes: int, disk_bytes: int, directory: Path | None, clock: Clock, retry_s: float = 30.0
    ) -> None:
        self._clock = clock
        self._memory_limit_bytes = memory_bytes
        self._disk_limit_bytes = disk_bytes
        self._memory: OrderedDict[bytes, tuple[StoredAnswer, float]] = OrderedDict()  # (stored at: monotonic s)
        self._memory_bytes = 0
        self._slow_until = float("-inf")  # until then the disk is not asked: it did not answer in time
        self._journal: BackgroundSqlite | None = None
        if directory is not None and disk_bytes > 0:
            self._journal = BackgroundSqlite(directory / FILE, _SCHEMA, after_batch=self._trim_disk, retry_s=retry_s)

    def start(self) -> None:
        if self._journal is not None:
            self._journal.start()

    def close(self) -> None:
        """Blocks until what is queued has been written (bounded)."""
        if self._journal is not None:
            self._journal.close()

    def stats(self) -> CacheStats:
        disk = self._journal.stats() if self._journal is not None else None
        return CacheStats(entries=len(self._memory), memory_bytes=self._memory_bytes, disk=disk)

    # --- lookup ------------------------------------------------------------------------------------------------------

    def lookup_memory(self, key: bytes) -> CacheHit | None:
        """From memory, at once."""
        entry = self._memory.get(key)
        if entry is None:
            return None
        self._memory.move_to_end(key)
        return CacheHit(entry[0], self._clock.monotonic() - entry[1])

    async def lookup_disk(self, key: bytes, request: Request) -> CacheHit | None:
        """From disk, after `recall` found nothing; what is found is in memory from now on."""
        if self._journal is None or self._clock.monotonic() < self._slow_until:
            return None
        try:
            rows = await self._journal.read(_GET, (key,), timeout_s=_FETCH_S)
        except TimeoutError:
            self._slow_until = self._clock.monotonic() + _SLOW_S
            return None
        if not rows:
            return None
        value, *stamp = rows[0]
        age_s = self._age_s(tuple(stamp))
        if age_s is None or not isinstance(value, bytes):
            return None
        answer = _revived(request, value)
        if answer is None:
            return None
        self._remember(key, answer, self._clock.monotonic() - age_s)
        self._journal.write(Write(_TOUCH, (self._clock.unix(), key)))
        return CacheHit(answer, age_s)

    def _age_s(self, stamp: Row) -> float | None:
        """(1) The same boot: monotonic. (2) Another boot: wall clock. (3) From the future: unknown."""
        boot, monotonic_s, unix_s = stamp
        if not isinstance(monotonic_s, float) or not isinstance(unix_s, float):
            return None
        if boot and boot == self._clock.boot_id:
            age_s = self._clock.monotonic() - monotonic_s  # (1)
        else:
            age_s = self._clock.unix() - unix_s  # (2)
        return age_s if age_s >= 0.0 else None  # (3)

    # --- store -------------------------------------------------------------------------------------------------------

    def put(self, key: bytes, answer: StoredAnswer, *, durable: bool = True) -> None:
        if answer.size_bytes > self._memory_limit_bytes // _LARGEST_SHARE:
            return
        now = self._clock.monotonic()
        self._remember(key, answer, now)
        if durable and self._journal is not None:
            value, unix = _encoded(answer), self._clock.unix()
            self._journal.write(Write(_PUT, (key, value, self._clock.boot_id, now, unix, unix), len(value)))

    def _remember(self, key: bytes, answer: StoredAnswer, stored_at: float) -> None:
        known = self._memory.pop(key, None)
        if known is not None:
            self._memory_bytes -= _cost_bytes(known[0])
        self._memory[key] = (answer, stored_at)
        self._memory_bytes += _cost_bytes(answer)
        while self._memory_bytes > self._memory_limit_bytes:
            _, (oldest, _) = self._memory.popitem(last=False)
            self._memory_bytes -= _cost_bytes(oldest)

    def _trim_disk(self, database: sqlite3.Connection) -> None:
        """In the journal's thread. Pages, not rows, are counted: that is what the file costs, and it is free to ask."""
        while used_bytes(database) > self._disk_limit_bytes:
            if database.execute(_EVICT).rowcount == 0:
                return


def _cost_bytes(answer: StoredAnswer) -> int:
    return answer.size_bytes + _ENTRY_OVERHEAD_BYTES


def _encoded(answer: StoredAnswer) -> bytes:
    if isinstance(answer.body, CachedAnswer):
        return _encoder.encode(_Stored(answer.target, answer.model, chunks=encode_chunks(answer.body.chunks)))
    return _encoder.encode(_Stored(answer.target, answer.model, embeddings=answer.body))


def _revived(request: Request, value: bytes) -> StoredAnswer | None:
    """None for what another version wrote, or what the disk made of it."""
    try:
        stored = _decoder.decode(value)
        if stored.embeddings is not None:
            return StoredAnswer(stored.target, stored.model, stored.embeddings)
        return StoredAnswer(
            stored.target, stored.model, CachedAnswer(request, stored.model, decode_chunks(stored.chunks))
        )
    except (msgspec.DecodeError, ValueError, StreamBroken):
        return None
