"""What shadow requests taught and cost, over restarts: the newest answers without content, and each day's money.

Also what comparisons of semantic answers have found.
"""

from __future__ import annotations

import functools
import logging
import sqlite3
from pathlib import Path

import msgspec

from models.calibrate import SHADOW_FILE as FILE
from models.calibrate.shadow import NEWEST_ANSWERS, PUT_ANSWER, SCHEMA, TRIM_ANSWERS, ShadowAnswer, decode_answer
from models.semantic.judge import Findings
from router.trackers import SpendState, SpendTracker

from ..clock import Clock
from .background_sqlite import BackgroundSqlite, Row, SqliteStore, Write
from .spend import spend_row

log = logging.getLogger(__name__)

_PUT_SPEND = "INSERT OR REPLACE INTO spend VALUES (1, ?)"
_GET_SPEND = "SELECT state FROM spend WHERE id = 1"
_PUT_FINDINGS = "INSERT OR REPLACE INTO semantic VALUES (1, ?)"
_GET_FINDINGS = "SELECT findings FROM semantic WHERE id = 1"
_ANSWER_BYTES, _STATE_BYTES = 1500, 4096  # approximate
_LOAD_TIMEOUT_S = 5.0


class ShadowStore(SqliteStore):
    """The shadow answers of one daemon, and what they cost.

    Args:
        directory: The state folder; None: nothing is kept over a restart.
        clock: Wall-clock time for the day, monotonic time for retries of the disk.
    """

    def __init__(self, directory: Path | None, clock: Clock) -> None:
        self._clock = clock
        self._tracker = SpendTracker()
        self.earlier_findings: Findings | None = None  # what comparisons of semantic answers had found before `load`
        database = None
        if directory is not None:
            # No lingering: a kill must not forget what was spent.
            database = BackgroundSqlite(directory / FILE, SCHEMA, trim=_trim, linger_s=0.0, monotonic=clock.monotonic)
        super().__init__(database)

    async def load(self, newest: int) -> list[ShadowAnswer]:
        """Load what earlier runs spent, and return their `newest` answers, oldest first."""
        self.start()
        if self.database is None:
            return []
        try:
            states = await self.database.read(_GET_SPEND, timeout_s=_LOAD_TIMEOUT_S)
            if states:
                self._tracker = SpendTracker(restored=msgspec.json.decode(str(states[0][0]), type=SpendState))
            found = await self.database.read(_GET_FINDINGS, timeout_s=_LOAD_TIMEOUT_S)
            if found:
                self.earlier_findings = msgspec.json.decode(str(found[0][0]), type=Findings)
            rows = await self.database.read(NEWEST_ANSWERS, (newest,), timeout_s=_LOAD_TIMEOUT_S)
        except (TimeoutError, msgspec.DecodeError, UnicodeDecodeError) as error:
            log.warning("what shadow requests taught earlier cannot be read: %s", type(error).__name__)
            return []
        return [answer for row in reversed(rows) if (answer := decode_answer(row[0])) is not None]

    @property
    def usd_today(self) -> float:
        """What shadow requests have cost since local midnight."""
        return self._tracker.signals(self._clock.unix()).usd_today or 0.0

    def charge(self, usd: float) -> None:
        """Add the cost of a shadow request, US dollars."""
        self._tracker.add(usd, self._clock.unix())
        self.write(Write(_PUT_SPEND, functools.partial(spend_row, self._tracker.state()), _STATE_BYTES))

    def add(self, answer: ShadowAnswer) -> None:
        """Keep an answer; the oldest ones give way."""
        self.write(Write(PUT_ANSWER, functools.partial(_answer_row, answer), _ANSWER_BYTES))

    def keep_findings(self, findings: Findings) -> None:
        """Keep what comparisons of semantic answers have found, in place of the former findings."""
        row = (msgspec.json.encode(findings).decode(),)
        self.write(Write(_PUT_FINDINGS, lambda: row, len(row[0])))


def _trim(database: sqlite3.Connection) -> None:
    database.execute(TRIM_ANSWERS)


def _answer_row(answer: ShadowAnswer) -> Row:
    return (msgspec.msgpack.encode(answer),)
