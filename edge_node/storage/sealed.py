"""The encrypted columns of the state folder's databases, and how rows are encrypted that are not, or by an old key.

Content is sealed for its table and row. Names by which rows are found are keyed digests (`StateKeys.keyed`). Times,
sizes, states and random ids stay readable, and so do sums of money (`spend`).

1. A file of the layout before encryption is encrypted at the start: each table in a transaction, then the whole file
   is written again, so that no free page has a readable copy, and the old one is overwritten. An interruption is
   continued.
2. A rotation rewrites rows in small transactions beside the daemon's own.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Final, NamedTuple

from causeway_server.router.serving.at_rest.sealing import MAGIC
from causeway_server.router.serving.at_rest.state_keys import LAYOUT, StateKeys, is_sealed
from causeway_server.router.serving.folders import sync

log = logging.getLogger(__name__)
PAGE_BYTES: Final = 1024  # page size of the file of jobs; a body wastes half a page
OVERFLOW_BYTES: Final = PAGE_BYTES - 4  # bytes of content in an overflow page
# The minimum part of a row that SQLite keeps in the shared page, without 3 bytes of the row's header. Its other
# bytes (its last number has 1 to 5) are added to that part, if the rest exactly fills its overflow pages.
SHARED_BYTES: Final = (PAGE_BYTES - 12) * 32 // 255 - 23 - 3
LENGTH: Final = struct.Struct("<I")
_STEP_ROWS = 64
_OLD_PROMPT = b"causeway prompt 1\n"
_PIECE_BYTES = 1 << 20
_CORRUPT = ("not a database", "malformed", "unsupported file format")


class SealedTable(NamedTuple):
    """Encrypted columns of a table."""

    name: str  # the table
    key: str  # the column that orders its rows
    row: str  # the columns to which a value is bound, beside the table
    sealed: tuple[str, ...]  # the encrypted columns. The first one is never empty.
    keyed: tuple[str, ...] = ()  # columns with keyed digests
    content: str = ""  # the content of the first column in the layout before encryption, an SQL expression
    upgrade: str = ""  # a statement that adds what the layout before does not have
    padded: bool = False  # the first column is a body in pages of its own, see `padded`

    @property
    def _is_not(self) -> str:
        """The condition, up to its last value, for rows that do not begin with a certain head."""
        at = SHARED_BYTES + LENGTH.size + 1 if self.padded else 1
        return f"substr({self.sealed[0]}, {at}, {{}}) != x'{{}}'"

    def encryption(self) -> str:
        """Return the statement that encrypts the rows of the layout before."""
        row = ", ".join(f"keyed({name})" if name in self.keyed else name for name in self.row.split(", "))
        function = "seal_body" if self.padded else "seal"
        first, *others = self.sealed
        values = [f"{first} = {function}({self.content or first}, '{self.name}', {row})"]
        values += [f"{column} = seal({column}, '{self.name}', {row})" for column in others]
        values += [f"{column} = keyed({column})" for column in self.keyed]
        where = self._is_not.format(len(MAGIC), MAGIC.hex())
        return f"UPDATE {self.name} SET {', '.join(values)} WHERE {where}"

    def step(self, head: bytes, *, begun: bool) -> str:
        """Return the statement that seals the next rows again, under the key with this head."""
        function, key = "reseal_body" if self.padded else "reseal", self.key
        values = [f"{column} = {function}({column}, '{self.name}', {self.row})" for column in self.sealed]
        is_not = self._is_not.format(len(head), head.hex())
        where = f"{key} > ? AND " * begun + is_not
        rows = f"SELECT {key} FROM {self.name} WHERE {where} ORDER BY {key} LIMIT {_STEP_ROWS}"
        return f"UPDATE {self.name} SET {', '.join(values)} WHERE {key} IN ({rows}) RETURNING {key}, {is_not}"


class SealedFile(NamedTuple):
    """`earlier`: name of the file of the layout before encryption."""

    earlier: str
    tables: tuple[SealedTable, ...]


_OWNER = "ALTER TABLE answers ADD COLUMN owner TEXT NOT NULL DEFAULT ''"
_MESSAGE = "CAST(x'92c4' || char(length(key)) || key || state AS BLOB)"  # msgpack's array of both
_UNPADDED = f"unpadded(substr(body, {SHARED_BYTES + 1}))"
SEALED: Final = {
    "cache-2.sqlite": SealedFile(
        "cache-1.sqlite", (SealedTable("answers", "key", "key", ("value",), ("key",), upgrade=_OWNER),)
    ),
    "decisions-2.sqlite": SealedFile("decisions-1.sqlite", (SealedTable("decisions", "rowid", "id", ("record",)),)),
    "shadow-2.sqlite": SealedFile("shadow-1.sqlite", (SealedTable("answers", "id", "id", ("answer",)),)),
    "sessions-2.sqlite": SealedFile(
        "sessions-1.sqlite", (SealedTable("sessions", "seq", "key", ("state",), ("key",), _MESSAGE),)
    ),
    "responses-2.sqlite": SealedFile(
        "responses-1.sqlite", (SealedTable("objects", "seq", "owner, name", ("data",), ("owner",)),)
    ),
    "jobs-3.sqlite": SealedFile(
        "jobs-2.sqlite",
        (
            SealedTable("jobs", "seq", "seq", ("record",), ("owner", "key")),
            SealedTable("requests", "seq", "seq", ("body",), content=_UNPADDED, padded=True),
            SealedTable("results", "seq", "seq", ("body",), content=_UNPADDED, padded=True),
            SealedTable("replies", "seq", "seq", ("address",)),
            SealedTable("webhooks", "number", "seq", ("notice",), ("receiver",)),
            SealedTable("webhook_secrets", "rowid", "owner", ("secret", "earlier"), ("owner",)),
        ),
    ),
}


def padded(data: bytes) -> bytes:
    """Return content so that SQLite keeps none of it in a page of several rows, where a deleted row leaves copies.

    Only the start of a long row is in the shared page; the rest is in overflow pages, which belong to the row alone,
    and which `secure_delete` fills with zeros: zeros fill the start, and the content begins with the first overflow
    page. See "Cell Payload Overflow Pages" in https://www.sqlite.org/fileformat2.html.
    """
    data = packed(data)
    return bytes(SHARED_BYTES) + data + bytes(-len(data) % OVERFLOW_BYTES)


def unpadded(stored: bytes | None) -> bytes:
    """Return the content of `padded`."""
    return b"" if stored is None else unpacked(stored[SHARED_BYTES:])


def packed(data: bytes) -> bytes:
    """Return content with its size before it."""
    return LENGTH.pack(len(data)) + data


def unpacked(stored: bytes) -> bytes:
    """Return the content at the start of `stored`; what is left of it, if it is damaged."""
    return stored[LENGTH.size :][: int.from_bytes(stored[: LENGTH.size], "little")]


def register(database: sqlite3.Connection, keys: StateKeys | None) -> None:
    """Add the SQL functions for encrypted columns to a connection; without keys, of one in memory, they do nothing.
    Raises OSError if there is no key.
    """
    if keys is None:
        for name in ("seal", "opened"):
            database.create_function(name, -1, lambda data, *_: data)
        database.create_function("keyed", 1, lambda name: name, deterministic=True)
        return
    keys.check_made()
    seal, opened = keys.seal, keys.open
    database.create_function("seal", -1, lambda data, *place: seal(data, *place) if data else data)
    database.create_function("opened", -1, opened)
    database.create_function("reseal", -1, lambda data, *place: keys.reseal(data, *place) if data else data)
    database.create_function("keyed", 1, keys.keyed, deterministic=True)
    database.create_function("seal_body", -1, lambda data, *place: padded(seal(data, *place)))
    database.create_function("opened_body", -1, lambda data, *place: opened(unpadded(data), *place))
    database.create_function("reseal_body", -1, lambda data, *place: padded(keys.reseal(unpadded(data), *place)))


def exists(path: Path) -> bool:
    """Return whether a file exists, if only in the layout before encryption."""
    return path.exists() or path.with_name(SEALED[path.name].earlier).exists()


def encrypt_earlier(path: Path, keys: StateKeys) -> None:
    """Encrypt the file of the layout before, if any; continue after an interruption (1). Raises OSError without enough
    space or a key, when nothing was changed; sqlite3.Error if the file is locked, or the disk has failed.
    """
    file = SEALED[path.name]
    old, draft = path.with_name(file.earlier), path.with_name(path.name + ".draft")
    if path.exists() or not (old.is_file() or draft.is_file()):
        return
    if not (draft.is_file() and is_sealed(draft)):
        try:
            _encrypt(old, draft, file, keys)
        except sqlite3.DatabaseError as error:
            if not any(text in str(error) for text in _CORRUPT):
                raise
            log.warning("%s is corrupt (%s). The file is erased, because it is not encrypted.", old, error)
    for name in (old.name, f"{old.name}-wal", f"{old.name}-shm", f"{old.name}-journal"):
        if (left := old.with_name(name)).exists():
            erase(left)
    if draft.exists():
        draft.replace(path)
        sync(path.parent)
        log.info("%s is now encrypted as %s.", old, path.name)


def encrypt_folder(keys: StateKeys) -> None:
    """Encrypt every file of the folder that an earlier version left readable, and erase copies that it left. Faults are
    logged; the store of a file tries again.
    """
    for name, file in SEALED.items():
        path, earlier = keys.folder / name, keys.folder / file.earlier
        if path.exists() and earlier.exists():
            log.warning("%s is not encrypted, so %s is used instead. Delete the unencrypted file.", earlier, name)
        try:
            encrypt_earlier(path, keys)
        except (OSError, sqlite3.Error) as error:
            log.error("%s cannot be encrypted, so it is not used: %s", earlier, error)
    set_aside = [keys.folder / f"{file.earlier}.bad" for file in SEALED.values()]
    for left in (*set_aside, *keys.folder.glob("prompts/*/*.prompt")):
        with suppress(OSError), left.open("rb") as opened:
            if left.suffix == ".bad" or opened.read(len(_OLD_PROMPT)) == _OLD_PROMPT:
                erase(left)


def _encrypt(old: Path, draft: Path, file: SealedFile, keys: StateKeys) -> None:
    """Encrypt the rows of a file, and write it again as `draft`, whose `user_version` says that it is complete."""
    draft.unlink(missing_ok=True)
    size, free = old.stat().st_size, shutil.disk_usage(old.parent).free
    if free < 2 * size:
        message = f"It must be encrypted, which takes {2 * size} bytes for a while, and {free} are free"
        raise OSError(errno.ENOSPC, message, str(old))
    with closing(sqlite3.connect(old, isolation_level=None)) as database:
        register(database, keys)
        database.create_function("unpadded", 1, lambda body: body.rstrip(b"\0"))  # JSON
        database.execute("PRAGMA journal_mode=DELETE")
        tables = _tables(database)
        for table in file.tables:
            if table.name in tables:
                with suppress(sqlite3.OperationalError):  # it was added before an interruption
                    database.execute(table.upgrade)
                database.execute(table.encryption())
        database.execute("VACUUM INTO ?", (str(draft),))
    draft.chmod(0o600)
    with closing(sqlite3.connect(draft, isolation_level=None)) as database:
        database.execute(f"PRAGMA user_version={LAYOUT}")
    sync(draft)


def _tables(database: sqlite3.Connection) -> set[str]:
    return {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def reseal_rows(path: Path, keys: StateKeys) -> Iterator[int]:
    """Seal rows of an old key again, in small transactions; yield their numbers (2). Those that cannot be opened stay,
    and are not counted. Raises OSError or sqlite3.Error.
    """
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as database:
        register(database, keys)
        tables = _tables(database)
        for table in SEALED[path.name].tables:
            last: tuple[object, ...] = ()
            while table.name in tables:
                rows = database.execute(table.step(keys.head, begun=bool(last)), last).fetchall()
                if not rows:
                    break
                last = (max(key for key, _ in rows),)
                yield sum(not unreadable for _, unreadable in rows)


def erase(path: Path) -> None:
    """Overwrite a file with zeros and remove it. Raises OSError."""
    with path.open("r+b", buffering=0) as file:
        _fill(file.fileno())
    path.unlink()
    sync(path.parent)


def replace_erased(new: Path, path: Path) -> None:
    """Rename `new` to `path`, and overwrite what was there with zeros. Raises OSError."""
    with path.open("r+b", buffering=0) as before:
        new.replace(path)
        sync(path.parent)
        _fill(before.fileno())


def _fill(file: int) -> None:
    size, at = os.fstat(file).st_size, 0
    while at < size:
        at += os.pwrite(file, bytes(min(size - at, _PIECE_BYTES)), at)
    os.fsync(file)
