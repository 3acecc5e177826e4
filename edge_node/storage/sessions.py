"""The sessions of a device: the newest in memory, and in a file from which they are read again after a restart.

States have digests, numbers and names, so that those of private sessions may be on the disk, too. The oldest one of the
client with the most of them gives way; those that are bound to the device or to regions are counted apart, so that
others do not displace them.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from causeway_server.router.decision.sessions import KEY_BYTES, client_of
from causeway_server.router.documents.data import text_of
from causeway_server.router.errors import JobStoreUnavailable
from causeway_server.router.serving.at_rest.state_keys import StateKeys
from causeway_server.router.types import Session, decode_row

from .group_commit import GroupCommit, TableHooks
from .sealed import exists

FILE = "sessions-2.sqlite"
MAX_SESSIONS = 16_384
"""The maximum number of states that are bound, and of those that are not. Each turn has one or two."""
_SCHEMA = text_of(__package__, "sessions.sql")
_PUT = "INSERT OR REPLACE INTO sessions (key, state) VALUES (keyed(?1), seal(?2, 'sessions', keyed(?1)))"
_ALL = "SELECT opened(state, 'sessions', key) FROM sessions ORDER BY seq"
_DELETE = "DELETE FROM sessions WHERE key = keyed(?)"
_decoder = msgspec.msgpack.Decoder(tuple[bytes, Session])
_encode = msgspec.msgpack.Encoder().encode
T = TypeVar("T")


class _States:
    """The newest states, by name: the digests of a client and of a history."""

    def __init__(self, most: int) -> None:
        self._most, self._count = most, 0
        self._by_client: dict[bytes, OrderedDict[bytes, Session]] = {}

    def get(self, name: bytes) -> Session | None:
        own = self._by_client.get(name[:KEY_BYTES])
        return None if own is None else own.get(name)

    def remove(self, name: bytes) -> None:
        own = self._by_client.get(name[:KEY_BYTES])
        if own is not None and own.pop(name, None) is not None:
            self._count -= 1
            if not own:
                del self._by_client[name[:KEY_BYTES]]

    def forget(self, client: bytes) -> list[bytes]:
        """Forget a client's states (b"": all), and return their names."""
        names = [name for one in ([client] if client else [*self._by_client]) for name in self._by_client.pop(one, ())]
        self._count -= len(names)
        return names

    def keep(self, name: bytes, state: Session) -> list[bytes]:
        """Keep a state as its client's newest one, and return the names that gave way."""
        self.remove(name)
        self._by_client.setdefault(name[:KEY_BYTES], OrderedDict())[name] = state
        self._count += 1
        gone: list[bytes] = []
        while self._count > self._most:
            crowd = max(self._by_client.values(), key=len)
            gone.append(next(iter(crowd)))
            self.remove(gone[-1])
        return gone


class SessionStore:
    """The states of sessions by client and key, which are digests; without a folder, the state folder, in memory alone.
    Used by the event loop only. `monotonic`: seconds; `keys`: as for `GroupCommit`.
    """

    def __init__(
        self,
        folder: Path | None,
        monotonic: Callable[[], float],
        most: int = MAX_SESSIONS,
        keys: StateKeys | None = None,
    ) -> None:
        self._bound, self._others = _States(most), _States(most)
        self._path = None if folder is None else folder / FILE
        self._file: GroupCommit | None = None
        self._started = False
        self._deletions = 0  # counted in the file's thread
        if self._path is not None:
            hooks = TableHooks(lambda _: None, deletions=lambda: self._deletions)
            self._file = GroupCommit(self._path, _SCHEMA, hooks, monotonic=monotonic, keys=keys)

    @property
    def problems(self) -> tuple[str, ...]:
        """Faults of the file."""
        return () if self._file is None else self._file.problems

    async def load(self) -> None:
        """Read the states of earlier runs, if there are any."""
        if self._path is None or not exists(self._path):
            return
        try:
            rows = await self._submit(lambda db: db.execute(_ALL).fetchall())
        except JobStoreUnavailable:
            return  # `problems` says so
        for (row,) in rows:
            if (found := decode_row(_decoder, row)) is not None:
                self._keep(*found)

    def find(self, client: bytes, key: bytes) -> Session | None:
        """Return the state of a client's key; None if it is unknown."""
        return self._bound.get(client + key) or self._others.get(client + key)

    def put(self, client: bytes, states: Mapping[bytes, Session]) -> asyncio.Future[None] | None:
        """Keep a client's states. Return a future that is done when they are on the disk, None if there is no disk."""
        gone = [(old,) for key, state in states.items() for old in self._keep(client + key, state)]
        if self._file is None:
            return None
        rows = [(client + key, _encode((client + key, state))) for key, state in states.items()]

        def write(db: sqlite3.Connection) -> None:
            db.executemany(_PUT, rows)
            db.executemany(_DELETE, gone)

        try:
            written = self._submit(write)
        except JobStoreUnavailable:
            return None  # at the end of the daemon
        written.add_done_callback(_see)
        return written

    async def erase(self, owner: str) -> int:
        """Erase a client's states ("": of all); return their number. Raises JobStoreUnavailable."""
        gone = [
            (name,)
            for states in (self._bound, self._others)
            for name in states.forget(client_of(owner) if owner else b"")
        ]

        def delete(db: sqlite3.Connection) -> None:
            db.executemany(_DELETE, gone)
            self._deletions += len(gone)

        if gone and self._file is not None:
            await self._submit(delete)
        return len(gone)

    def close(self) -> None:
        """Commit waiting work. Blocking."""
        if self._file is not None and self._started:
            self._file.close(timeout_s=10.0)

    def _submit(self, work: Callable[[sqlite3.Connection], T]) -> asyncio.Future[T]:
        assert self._file is not None
        if not self._started:
            self._started = True
            self._file.start()
        return self._file.submit(work)

    def _keep(self, name: bytes, state: Session) -> list[bytes]:
        """Keep a state as its client's newest one, and return the names that gave way."""
        self._others.remove(name)
        kept = self._bound if state.on_device or state.regions is not None else self._others
        return kept.keep(name, state)


def _see(written: asyncio.Future[None]) -> None:
    """Take note of an error that no request waits for; `problems` tells it."""
    if not written.cancelled():
        written.exception()
