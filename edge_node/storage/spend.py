"""The store of spending, which survives restarts: costs are added up in memory, and written to SQLite after each cost.

The file holds the complete sums, taken in the event loop: a write that was dropped because the disk was full is covered
by the next one, and costs that arrive during a write are in the write after it.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from causeway_server.router.decision.pacing import Demand, EnergyState, Pacer, Steps
from causeway_server.router.documents.data import text_of
from causeway_server.router.serving.at_rest.state_keys import StateKeys
from causeway_server.router.trackers import SpendState, SpendTracker
from causeway_server.router.types import SpendSignals

from ..clock import Clock
from .background_sqlite import BackgroundSqlite, SqliteStore, Write

log = logging.getLogger(__name__)

_T = TypeVar("_T")
FILE = "spend-1.sqlite"
_SCHEMA = text_of(__package__, "spend.sql")
_PUT = "INSERT OR REPLACE INTO spend VALUES (?, ?)"
_GET = "SELECT state FROM spend WHERE id = ?"
_SUMS, _DEMAND, ENERGY = 1, 2, 3  # rows
_UNREADABLE = (TimeoutError, msgspec.DecodeError, UnicodeDecodeError)
_TRIM = "DELETE FROM clients WHERE rowid <= (SELECT max(rowid) FROM clients) - 8192"
_STATE_BYTES = 4096  # approximate
_DEMAND_BYTES = 65536  # approximate
_REPRICED = 16  # offers after which the price is computed again, which takes a millisecond
_SAVED = 256  # offers after which they are saved
LOAD_TIMEOUT_S = 5.0


def _trim(database: sqlite3.Connection) -> None:
    database.execute(_TRIM)


class SpendStore(SqliteStore):
    """The spending of one daemon; without a `directory`, the state folder, in memory alone. `schema`: its tables, one
    of which is `spend`; `trim`, `keys`: as for `BackgroundSqlite`.
    """

    def __init__(
        self,
        directory: Path | None,
        clock: Clock,
        file: str = FILE,
        schema: str = _SCHEMA,
        trim: Callable[[sqlite3.Connection], None] = _trim,
        keys: StateKeys | None = None,
    ) -> None:
        self.clock = clock
        self._tracker = SpendTracker()
        self.reserved_usd = 0.0
        """The most that requests in flight may cost, US dollars."""
        self._pacer = Pacer()
        self._offers = 0
        self._price: tuple[int, float, float, float] | None = None  # (offers // 16, hours // 0.05, budget, price)
        self.current = SpendSignals()
        """The sums as of the last cost or `refresh`. Each decision reads them."""
        self.refresh()
        self._file = file
        database = None
        if directory is not None:
            # No lingering: a killed daemon must not forget its spending.
            database = BackgroundSqlite(
                directory / file, schema, trim=trim, linger_s=0.0, monotonic=clock.monotonic, keys=keys
            )
        super().__init__(database)

    async def load(self) -> bool:
        """Load the spending of earlier runs. Return False, and start at 0, if it cannot be read."""
        self.start()
        if self.database is None:
            return False
        try:
            self._tracker = SpendTracker(restored=await self._read(_SUMS, SpendState))
        except _UNREADABLE as error:
            fault = type(error).__name__
            log.warning("The spending of earlier runs in %s cannot be read, so it starts at 0: %s", self._file, fault)
            return False
        self.refresh()
        self._pacer = Pacer(await self.learned(_DEMAND, Demand))
        return True

    async def _read(self, row: int, kind: type[_T]) -> _T:
        rows = [] if self.database is None else await self.database.read(_GET, (row,), timeout_s=LOAD_TIMEOUT_S)
        return msgspec.json.decode(str(rows[0][0]), type=kind) if rows else kind()

    async def learned(self, row: int, kind: type[_T]) -> _T:
        """Return what earlier runs learned of the usual day."""
        try:
            return await self._read(row, kind)
        except _UNREADABLE as error:
            fault = type(error).__name__
            log.warning("The usual load of a day in %s cannot be read, so it is learned again: %s", self._file, fault)
            return kind()

    def remember(self, row: int, state: SpendState | Demand | EnergyState, size_bytes: int = _DEMAND_BYTES) -> None:
        """Write a row."""
        self.write(Write(_PUT, lambda: (row, msgspec.json.encode(state).decode()), size_bytes))

    def add(self, usd: float) -> None:
        """Add the cost of an answer, US dollars."""
        self._tracker.add(usd, self.clock.unix())
        known = (self.current.usd_hour, self.current.usd_today, self.current.usd_month)
        self.current = SpendSignals(*((one or 0.0) + usd for one in known))  # adding all of them up again takes longer
        self.remember(_SUMS, self._tracker.state(), _STATE_BYTES)

    def paced(self, budget_usd: float) -> SpendSignals:
        """Return the sums, with what is left of a budget of the local day, and its price."""
        day, hours = self.local()
        left = budget_usd - (self.current.usd_today or 0.0)
        at = (self._offers // _REPRICED, hours // 0.05, budget_usd)
        if self._price is None or self._price[:3] != at:
            self._price = (*at, self._pacer.price(max(0.0, left), day, hours))
        return msgspec.structs.replace(self.current, usd_left=left - self.reserved_usd, price=self._price[3])

    def local(self, since_h: float = 0.0) -> tuple[str, float]:
        """Return the local date and the hours that have passed, of a day that begins at an hour."""
        return self._tracker.local(self.clock.unix() - since_h * 3600.0)

    def offer(self, steps: Steps) -> None:
        """Take note of a choice between targets, for the price of the next ones."""
        day, hours = self.local()
        self._pacer.offer(steps, day, int(hours))
        self._offers += 1
        if self._offers % _SAVED == 0:
            self.remember(_DEMAND, self._pacer.state())

    def close(self) -> None:
        if self._offers:
            self.remember(_DEMAND, self._pacer.state())
        super().close()

    def refresh(self) -> None:
        """Remove old costs from the sums of the hour, the day and the month. Call it about once a second."""
        self.current = self._tracker.signals(self.clock.unix())
