"""Decision records of past requests, without their content: the newest in memory, older ones in SQLite.

Records of cache hits stay in memory: a row on disk for every hit would wear the flash and add little information. Rows
are deleted by age in the device's own time and in the order of arrival: a jump of the wall clock deletes none.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import sqlite3
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from causeway_server.router.documents.data import text_of
from causeway_server.router.errors import QueueFull
from causeway_server.router.migrate.records import RecordBefore, with_new_names
from causeway_server.router.serving.at_rest.state_keys import StateKeys
from causeway_server.router.serving.logs import redacted
from causeway_server.router.trackers import FairShare, network_of
from causeway_server.router.types import DecisionRecord, decode_row

from ..clock import Clock, ClockMark, DeviceTime
from .background_sqlite import BackgroundSqlite, Row, SqliteStore, Value, Write, evict
from .sealed import register

log = logging.getLogger(__name__)

FILE = "decisions-2.sqlite"
DISK_BYTES = 64 * 1024 * 1024
MAX_QUERY_LIMIT = 1000
# concurrent searches of the file: each reads all of it, which takes a tenth of a second of its thread
_MAX_SEARCHES = 8
_RECORD_BYTES = 2048  # approximate
_SCHEMA = text_of(__package__, "decisions.sql")
_RECORD = "opened(record, 'decisions', id)"
_PUT = "INSERT OR REPLACE INTO decisions VALUES (?, ?, ?, ?, ?, ?)"
_READ = f"SELECT {_RECORD} FROM decisions WHERE created >= ? ORDER BY created, id"
_ERASE = f"DELETE FROM decisions WHERE ?1 IN ('', client_of({_RECORD})) RETURNING id"
_EVICT = "DELETE FROM decisions WHERE id IN (SELECT id FROM decisions ORDER BY rowid LIMIT 256)"
_AGES = 256  # number of records of the newest row, over `max_age_s`
_LATER_S, _BREAK_S = 0.02, 0.001  # how long records wait to be made, and between two lots of them
_MADE_AT_ONCE = 32


class DecisionQuery(msgspec.Struct, frozen=True):
    """Filters of decision records. Empty strings match everything; `since` is Unix seconds."""

    route: str = ""
    target: str = ""
    status: str = ""
    since: float = 0.0
    limit: int = 100
    client: str = ""


class _ClientOfRequest(msgspec.Struct, frozen=True):
    client: str


class _RequestOfRecord(msgspec.Struct, frozen=True):
    request: _ClientOfRequest


_decoder = msgspec.msgpack.Decoder(DecisionRecord)
_encode = msgspec.msgpack.Encoder().encode
_request_decoder = msgspec.msgpack.Decoder(_RequestOfRecord)
_decoder_before = msgspec.msgpack.Decoder(RecordBefore)


class DecisionStore(SqliteStore):
    """The decision records of one daemon: `memory_records` in memory, and on disk, in the state folder `directory`
    (None: memory only), those up to `max_age_s`. `keys`: as for `BackgroundSqlite`.
    """

    def __init__(
        self,
        *,
        memory_records: int,
        max_age_s: float,
        directory: Path | None,
        clock: Clock,
        keys: StateKeys | None = None,
    ) -> None:
        self._memory_records = memory_records
        self._max_age_s = max_age_s
        self._ages = _RowAges(clock, max_age_s)
        self.memory: OrderedDict[str, DecisionRecord] = OrderedDict()
        self.sample: Callable[[DecisionRecord], None] | None = None  # of a device in a fleet
        self._searches = FairShare(_MAX_SEARCHES)
        self._later: deque[Callable[[], None]] = deque()
        self._is_settling = False
        keys = keys or StateKeys(directory or Path())
        self._encoder = _RowEncoder(keys)
        database = None
        if directory is not None and max_age_s > 0.0:
            database = BackgroundSqlite(
                directory / FILE, _SCHEMA, trim=self._trim_disk, functions={"client_of": _client_of}, keys=keys
            )
        super().__init__(database)

    @property
    def newest(self) -> DecisionRecord | None:
        """The newest record in memory."""
        self.settle()
        return next(reversed(self.memory.values()), None)

    def later(self, add: Callable[[], None]) -> None:
        """Call what adds a record some milliseconds later, or before records are read: where many requests end
        together, the next ones begin first, and many records made in a row take a third of the time.
        """
        if not self._later:
            asyncio.get_running_loop().call_later(_LATER_S, self._add_some)
        self._later.append(add)

    def settle(self, most: int | None = None) -> None:
        """Add the records that wait, at most so many."""
        self._is_settling = True
        for _ in range(len(self._later) if most is None else min(most, len(self._later))):
            try:
                self._later.popleft()()
            except Exception as error:
                log.error("A decision could not be recorded: %s.", redacted(error))
        self._is_settling = False

    def _add_some(self) -> None:
        self.settle(_MADE_AT_ONCE)
        if self._later:
            asyncio.get_running_loop().call_later(_BREAK_S, self._add_some)

    def add(self, record: DecisionRecord) -> None:
        if self._later and not self._is_settling:
            self.settle()  # which ended before this one
        self.memory[record.id] = record
        if len(self.memory) > self._memory_records:
            self.memory.popitem(last=False)
        if record.outcome.cache != "hit":
            self.write(Write(_PUT, functools.partial(self._encoder.row, record), _RECORD_BYTES))
            if self.sample is not None:
                self.sample(record)

    async def get(self, decision_id: str, *, client: str = "") -> DecisionRecord | None:
        """Return the record, from memory or from disk; None if it is unknown, or of another client than `client`."""
        self.settle()
        record = self.memory.get(decision_id)
        if record is None and self.database is not None:
            rows = await self._read(f"SELECT {_RECORD} FROM decisions WHERE id = ?", (decision_id,))
            record = _record(rows[0][0]) if rows else None
        return None if record is None or client not in ("", record.request.client) else record

    async def find(self, query: DecisionQuery, caller: str = "") -> list[DecisionRecord]:
        """Return the matching records, newest first: those in memory, then those only on disk. QueueFull: the share of
        searches on disk of `caller`, the client, is used up.
        """
        self.settle()
        limit = max(0, min(query.limit, MAX_QUERY_LIMIT))
        records = [record for record in reversed(self.memory.values()) if _matches(record, query)][:limit]
        oldest = next(iter(self.memory.values())).created if self.memory else math.inf
        # Last: the console asks once a second for new records, which are always in memory.
        if self.database is None or len(records) == limit or oldest < query.since:
            return records
        if not self._searches.hold(search := object(), network_of(caller)):
            raise QueueFull(
                (
                    f"You have {self._searches.held_by(network_of(caller))} searches of decision records in progress, "
                    f"which is your share of {_MAX_SEARCHES}. Repeat this search when one of the others has ended."
                ),
                retry_after_s=1.0,
            )
        try:
            older = await self._find_on_disk(query, oldest, limit)
        finally:
            self._searches.release(search)
        return (records + [record for record in older if record.id not in self.memory])[:limit]

    async def erase(self, client: str) -> int:
        """Erase a client's records ("": of all); return their number. Raises JobStoreUnavailable."""
        self.settle()
        ids = {record.id for record in self.memory.values() if client in ("", record.request.client)}
        for decision_id in ids:
            del self.memory[decision_id]
        if self.database is not None:
            ids |= {str(row[0]) for row in await self.database.erase(_ERASE, (client,))}
        return len(ids)

    async def _find_on_disk(self, query: DecisionQuery, oldest: float, limit: int) -> list[DecisionRecord]:
        """Return the matching records that are not newer than `oldest`, Unix seconds."""
        where = ["created >= ?", "created <= ?"]
        values: list[Value] = [query.since, oldest]
        columns = (("route", query.route), ("target", query.target), ("status", query.status))
        for column, value in (*columns, (f"client_of({_RECORD})", query.client)):
            if value:
                where.append(f"{column} = ?")
                values.append(value)
        statement = f"SELECT {_RECORD} FROM decisions WHERE {' AND '.join(where)} ORDER BY created DESC LIMIT ?"
        rows = await self._read(statement, (*values, limit))
        return [record for row in rows if (record := _record(row[0])) is not None]

    async def _read(self, statement: str, values: Row) -> list[Row]:
        """Return the rows on disk; none if the disk does not answer in time."""
        assert self.database is not None
        try:
            return await self.database.read(statement, values)
        except TimeoutError:
            return []

    def _trim_disk(self, database: sqlite3.Connection) -> None:
        self._ages.delete_old(database)
        evict(database, DISK_BYTES, _EVICT)


class _RowAges:
    """Deletes rows that are older than `max_age_s`; records the newest row at intervals. For one thread."""

    def __init__(self, clock: Clock, max_age_s: float) -> None:
        self._time = DeviceTime(clock)
        self._max_age_s = max_age_s
        self._noted_at = -math.inf
        self._restored = False

    def delete_old(self, database: sqlite3.Connection) -> None:
        if not self._restored:
            row = database.execute("SELECT mark FROM box WHERE id = 1").fetchone()
            mark = None if row is None else _decode_mark(row[0])
            if mark is None:
                database.execute("DELETE FROM ages")  # a row of another time
            self._time.restore(mark)
            self._restored = True
        now = self._time.now()
        old = (now - self._max_age_s,)
        (newest,) = database.execute("SELECT max(newest) FROM ages WHERE elapsed <= ?", old).fetchone()
        if newest is not None:
            database.execute("DELETE FROM decisions WHERE rowid <= ?", (newest,))
            database.execute("DELETE FROM ages WHERE elapsed <= ?", old)
        if now >= self._noted_at + self._max_age_s / _AGES:
            database.execute("INSERT INTO ages SELECT ?, max(rowid) FROM decisions HAVING max(rowid) NOT NULL", (now,))
            self._noted_at = now
        database.execute("INSERT OR REPLACE INTO box VALUES (1, ?)", (msgspec.msgpack.encode(self._time.mark()),))


class StoredRecords(msgspec.Struct, frozen=True):
    """Records on disk, oldest first. `unreadable`: rows that another version wrote and this one cannot read."""

    records: Iterator[DecisionRecord]
    unreadable: Callable[[], int]


def read_stored(directory: Path, *, since: float = 0.0, keys: StateKeys | None = None) -> StoredRecords:
    """Read the records of a state folder since then (Unix seconds), also while a daemon writes to it.

    Args:
        keys: The keys of the folder; None: by the owner's key that they name.
    Raises:
        ConfigError: The folder's keys cannot be opened.
        FileNotFoundError, PermissionError: The folder has no decision records, or they cannot be read.
        OSError: The file is not a database, or is damaged; iterating over `records` raises it, too.
    """
    path = directory / FILE
    with path.open("rb"):
        pass  # for an error that names the cause: SQLite says only that it cannot open the file
    keys = keys or StateKeys(directory)
    keys.check()
    unreadable = 0

    def records() -> Iterator[DecisionRecord]:
        nonlocal unreadable
        try:
            with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
                register(database, keys)
                for row in database.execute(_READ, (since,)):
                    record = _record(row[0])
                    if record is None:
                        unreadable += 1
                    else:
                        yield record
        except sqlite3.Error as error:
            raise OSError(f"{path}: {error}") from error

    return StoredRecords(records(), lambda: unreadable)


def _decode_mark(data: Value) -> ClockMark | None:
    """Return the recorded time; None for a damaged record, in which case all rows count as written at this start."""
    try:
        return msgspec.msgpack.decode(data, type=ClockMark)  # type: ignore[arg-type]
    except Exception:
        return None


def _client_of(data: object) -> str | None:
    """Return the client of a row's record, as an SQL function: earlier versions can use the same table."""
    try:
        return _request_decoder.decode(data).request.client if isinstance(data, bytes) else None
    except msgspec.DecodeError:
        return None


def _record(data: Value) -> DecisionRecord | None:
    """Return a row's record; None for one that cannot be read."""
    record = decode_row(_decoder, data)
    return with_new_names(record, data, _decoder_before) if record is not None and isinstance(data, bytes) else None


_StoredRecord = msgspec.defstruct("_StoredRecord", DecisionRecord.__struct_fields__)  # `DecisionRecord`, part encoded
_MAX_PARTS = 256


class _RowEncoder:
    """Encodes records as rows. What records share, which is most of them, is encoded once, and without the fields that
    have their defaults: two rows fit a page of the file. For one thread.
    """

    def __init__(self, keys: StateKeys) -> None:
        self._keys = keys
        self._parts: dict[int, tuple[object, msgspec.Raw]] = {}  # by identity, which the value itself keeps

    def row(self, record: DecisionRecord) -> Row:
        outcome, shared = record.outcome, self._shared
        stored = _StoredRecord(
            record.id,
            record.created,
            record.request,
            shared(record.estimates),
            record.unrecorded,
            shared(record.snapshot),
            shared(record.decision),
            outcome,
            record.parts,
            record.shadow,
            record.trial_group,
        )
        # Here, because for a function in SQL each row would wait for the interpreter.
        sealed = self._keys.seal(_encode(stored), "decisions", record.id)
        return (record.id, record.created, outcome.route, outcome.target, outcome.status, sealed)

    def _shared(self, value: object) -> object:
        """Return a value whose structs are encoded, at any depth."""
        if isinstance(value, msgspec.Struct):
            known = self._parts.get(id(value))
            if known is None:
                if len(self._parts) >= _MAX_PARTS:
                    self._parts.clear()
                sparse = _sparse(type(value))
                fields = [self._shared(getattr(value, name)) for name in sparse.__struct_fields__]
                known = self._parts[id(value)] = (value, msgspec.Raw(_encode(sparse(*fields))))
            return known[1]
        if isinstance(value, tuple):
            return tuple(map(self._shared, value))
        return {key: self._shared(one) for key, one in value.items()} if isinstance(value, dict) else value


@functools.cache
def _sparse(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """Return a struct of the same fields that is encoded without those that have their defaults."""
    fields: list[tuple[str, type, Any]] = []
    for field in msgspec.structs.fields(kind):
        default = {} if field.required else {"default": field.default, "default_factory": field.default_factory}
        fields.append((field.name, object, msgspec.field(name=field.encode_name, **default)))
    config = kind.__struct_config__
    return msgspec.defstruct(kind.__name__, fields, omit_defaults=True, tag=config.tag, tag_field=config.tag_field)


def _matches(record: DecisionRecord, query: DecisionQuery) -> bool:
    outcome = record.outcome
    return (
        query.route in ("", outcome.route)
        and query.target in ("", outcome.target)
        and query.status in ("", outcome.status)
        and query.client in ("", record.request.client)
        and record.created >= query.since
    )
