"""The stored responses and conversations of a device, of each client apart: in a file, private ones in memory.

A client's oldest objects give way to its new ones, and beyond the limit of all clients the oldest of all. They expire
by the device's own time. A conversation and its turns expire, give way and are deleted together.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from causeway_server.router.documents.data import text_of
from causeway_server.router.errors import BodyTooLarge
from causeway_server.router.openai.responses.state import group_of
from causeway_server.router.serving.at_rest.state_keys import StateKeys

from ..clock import Clock, ClockMark, DeviceTime
from ..config.schema import ResponsesConfig
from .group_commit import GroupCommit, TableHooks
from .sealed import exists, register

FILE = "responses-2.sqlite"
_SCHEMA = text_of(__package__, "responses.sql")
_PUT = (
    "INSERT INTO objects (owner, name, place, expires, bytes, data) "
    "VALUES (keyed(?1), ?2, ?3, ?4, ?5, seal(?6, 'objects', keyed(?1), ?2)) "
    "ON CONFLICT (owner, name) DO UPDATE SET bytes = excluded.bytes, data = excluded.data"
)
_TOUCH = "UPDATE objects SET expires = ? WHERE owner = keyed(?) AND place = ?"
_EXPIRE = "DELETE FROM objects WHERE expires <= ?"
_HELD = "SELECT count(*), coalesce(sum(bytes), 0) FROM objects WHERE owner = keyed(?)"
_DATA = "SELECT opened(data, 'objects', owner, name) FROM objects"
_HELD_BY_ALL = "SELECT coalesce(sum(bytes), 0) FROM objects"
_OLDEST = (
    "SELECT owner, place FROM objects WHERE (owner, place) != (keyed(?1), ?2) AND (?3 = '' OR owner = keyed(?3)) "
    "ORDER BY expires, seq"
)
_HELD_BY_PLACE = f"{_HELD} AND place = ? AND name != ?"
_DROP = "DELETE FROM objects WHERE owner = ? AND place = ?"
_decode_mark = msgspec.msgpack.Decoder(ClockMark).decode
T = TypeVar("T")


class _Objects:
    """The objects in one database. `now` is the device's own time, s."""

    def __init__(self, config: ResponsesConfig) -> None:
        self._config = config
        self.deletions = 0

    def put(self, db: sqlite3.Connection, now: float, owner: str, name: str, data: bytes, *, only_known: bool) -> None:
        """Store an object, in the place of one of the same name. Raises BodyTooLarge."""
        config, place = self._config, group_of(name)
        if only_known and not self.read(db, now, owner, [name])[0]:
            return
        count, size = db.execute(_HELD_BY_PLACE, (owner, place, name)).fetchone()
        if count >= config.max_responses or size + len(data) > config.max_bytes:
            raise BodyTooLarge(
                f"{place} has {size + len(data)} bytes and {count + 1} turns; at most {config.max_bytes} bytes "
                f"(responses.max_bytes) and {config.max_responses} turns (responses.max_responses) are stored."
            )
        self._expire(db, now)
        expires = now + config.ttl_s
        db.execute(_PUT, (owner, name, place, expires, len(data), data))
        db.execute(_TOUCH, (expires, owner, place))
        while (client := self._over_limit(db, owner)) is not None:
            oldest = db.execute(_OLDEST, (owner, place, client)).fetchone()
            if oldest is None:
                break
            self._drop(db, *oldest)

    def read(self, db: sqlite3.Connection, now: float, owner: str, names: Sequence[str]) -> list[bytes]:
        """Return objects, b"" for each that is not there."""
        self._expire(db, now)
        rows = (db.execute(f"{_DATA} WHERE owner = keyed(?) AND name = ?", (owner, name)).fetchone() for name in names)
        return [b"" if row is None else row[0] for row in rows]

    def read_group(self, db: sqlite3.Connection, now: float, owner: str, place: str) -> list[bytes]:
        """Return the objects of a place in order."""
        self._expire(db, now)
        query = f"{_DATA} WHERE owner = keyed(?) AND place = ? ORDER BY seq"
        return [data for (data,) in db.execute(query, (owner, place))]

    def delete(self, db: sqlite3.Connection, owner: str, name: str) -> bool:
        """Delete an object, or a whole place. Return whether there was one."""
        query = "DELETE FROM objects WHERE owner = keyed(?) AND (name = ? OR place = ?)"
        deleted = db.execute(query, (owner, name, name)).rowcount
        self.deletions += deleted
        return deleted > 0

    def erase(self, db: sqlite3.Connection, owner: str) -> int:
        """Delete all objects of a client ("": of all); return their number."""
        erased = db.execute("DELETE FROM objects WHERE keyed(?) IN ('', owner)", (owner,)).rowcount
        self.deletions += erased
        return erased

    def _over_limit(self, db: sqlite3.Connection, owner: str) -> str | None:
        """Return the client whose objects must give way: the owner, "" for any; None if nothing must."""
        count, size = db.execute(_HELD, (owner,)).fetchone()
        if count > self._config.max_responses or size > self._config.max_bytes:
            return owner
        (total,) = db.execute(_HELD_BY_ALL).fetchone()
        return "" if total > self._config.max_total_bytes else None

    def _expire(self, db: sqlite3.Connection, now: float) -> None:
        self.deletions += db.execute(_EXPIRE, (now,)).rowcount

    def _drop(self, db: sqlite3.Connection, owner: str, place: str) -> None:
        self.deletions += db.execute(_DROP, (owner, place)).rowcount


class DeviceResponseStore:
    """The store of responses (`StateStore`). The file in the state folder is opened with the first object, or if it
    exists; without a folder everything is in memory, and lost at the daemon's end.
    """

    def __init__(
        self, folder: Path | None, config: ResponsesConfig, clock: Clock, keys: StateKeys | None = None
    ) -> None:
        self._time = DeviceTime(clock)
        self._now = clock.monotonic  # of the memory
        self._objects = _Objects(config)
        self._private = _Objects(config)
        self._memory = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        register(self._memory, None)
        self._memory.executescript(_SCHEMA)
        self._file: GroupCommit | None = None
        self._path = None if folder is None else folder / FILE
        if self._path is not None:
            hooks = TableHooks(self._load, self._seal, deletions=lambda: self._objects.deletions)
            self._file = GroupCommit(self._path, _SCHEMA, hooks, monotonic=clock.monotonic, keys=keys)
        self._started = False

    @property
    def problems(self) -> tuple[str, ...]:
        """Faults of the file."""
        return () if self._file is None else self._file.problems

    def close(self) -> None:
        """Commit waiting work. Blocking."""
        if self._file is not None and self._started:
            self._file.close(timeout_s=10.0)
        self._memory.close()

    async def put(
        self, owner: str, name: str, data: bytes, *, private: bool, user: str, only_known: bool = False
    ) -> None:
        """Store an object. Raises BodyTooLarge or JobStoreUnavailable."""
        if private or self._file is None:
            self._private.put(self._memory, self._now(), owner, name, data, only_known=only_known)
            return
        put = partial(self._objects.put, owner=owner, name=name, data=data, only_known=only_known)
        await self._run(lambda db: put(db, self._time.now()))

    async def read(self, owner: str, names: Sequence[str]) -> list[bytes]:
        """Return objects, b"" for each that is not there. Raises JobStoreUnavailable."""
        if not names:
            return []
        private = self._private.read(self._memory, self._now(), owner, names)
        if all(private) or not self._exists:
            return private
        stored = await self._run(lambda db: self._objects.read(db, self._time.now(), owner, names))
        return [kept or data for kept, data in zip(private, stored, strict=True)]

    async def read_group(self, owner: str, group: str) -> list[bytes]:
        """Return a conversation and its turns: the private ones are the last. Raises JobStoreUnavailable."""
        stored: list[bytes] = []
        if self._exists:
            stored = await self._run(lambda db: self._objects.read_group(db, self._time.now(), owner, group))
        private = self._private.read_group(self._memory, self._now(), owner, group)
        return stored + private if stored or self._file is None else []

    async def delete(self, owner: str, name: str) -> bool:
        """Delete an object, a conversation with its turns. Raises JobStoreUnavailable."""
        deleted = self._private.delete(self._memory, owner, name)
        if self._exists:
            deleted = await self._run(lambda db: self._objects.delete(db, owner, name)) or deleted
        return deleted

    async def erase(self, owner: str) -> int:
        """Erase all objects of a client; return their number. Raises JobStoreUnavailable."""
        erased = self._private.erase(self._memory, owner)
        if self._exists:
            erased += await self._run(lambda db: self._objects.erase(db, owner))
        return erased

    @property
    def _exists(self) -> bool:
        return self._started or (self._path is not None and exists(self._path))

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        assert self._file is not None
        if not self._started:
            self._started = True
            self._file.start()
        return await self._file.run(work)

    def _load(self, db: sqlite3.Connection) -> None:
        row = db.execute("SELECT mark FROM device").fetchone()
        self._time.restore(None if row is None else _decode_mark(row[0]))

    def _seal(self, db: sqlite3.Connection) -> None:
        db.execute("INSERT OR REPLACE INTO device VALUES (1, ?)", (msgspec.msgpack.encode(self._time.mark()),))
