"""The store of shadow requests' results and costs, which survives restarts: the newest answers without content, and the
cost of each day.

The results of comparisons of semantic answers, and the evidence of promises of quality, are kept as well.
"""

from __future__ import annotations

import functools
import logging
import sqlite3
from pathlib import Path

import msgspec

from causeway_server.models.semantic.judge import Findings
from causeway_server.models.signals import SHADOW_FILE as FILE
from causeway_server.models.signals.promise import PromiseRecord
from causeway_server.models.signals.shadow import (
    NEWEST_ANSWERS,
    PUT_ANSWER,
    SCHEMA,
    TRIM_ANSWERS,
    ShadowAnswer,
    decode_answer,
)
from causeway_server.router.serving.at_rest.state_keys import StateKeys

from ..clock import Clock
from .background_sqlite import Row, Write
from .spend import LOAD_TIMEOUT_S, SpendStore

log = logging.getLogger(__name__)

_PUT_FINDINGS = "INSERT OR REPLACE INTO semantic VALUES (1, ?)"
_GET_FINDINGS = "SELECT findings FROM semantic WHERE id = 1"
_PUT_PROMISES = "INSERT OR REPLACE INTO promises VALUES (1, ?)"
_GET_PROMISES = "SELECT records FROM promises WHERE id = 1"
_ANSWER_BYTES = 1500  # approximate


class ShadowStore(SpendStore):
    """The shadow answers of one daemon, and their costs (`add`); without a `directory` a restart loses them."""

    def __init__(self, directory: Path | None, clock: Clock, keys: StateKeys | None = None) -> None:
        super().__init__(directory, clock, FILE, SCHEMA, _trim, keys)
        self.earlier_findings: Findings | None = None  # results of comparisons of semantic answers before `restore`
        self.earlier_promises: list[PromiseRecord] = []

    async def restore(self, newest: int) -> list[ShadowAnswer]:
        """Load the spending of earlier runs, and return their `newest` answers, oldest first."""
        if not await self.load() or self.database is None:
            return []
        try:
            found = await self.database.read(_GET_FINDINGS, timeout_s=LOAD_TIMEOUT_S)
            if found:
                self.earlier_findings = msgspec.json.decode(str(found[0][0]), type=Findings)
            found = await self.database.read(_GET_PROMISES, timeout_s=LOAD_TIMEOUT_S)
            if found:
                self.earlier_promises = msgspec.json.decode(str(found[0][0]), type=list[PromiseRecord])
            rows = await self.database.read(NEWEST_ANSWERS, (newest,), timeout_s=LOAD_TIMEOUT_S)
        except (TimeoutError, msgspec.DecodeError, UnicodeDecodeError) as error:
            log.warning("The results of earlier shadow requests cannot be read: %s", type(error).__name__)
            return []
        return [answer for row in reversed(rows) if (answer := decode_answer(row[0])) is not None]

    @property
    def usd_today(self) -> float:
        """The cost of shadow requests since local midnight, US dollars."""
        return self._tracker.signals(self.clock.unix()).usd_today or 0.0

    def keep(self, answer: ShadowAnswer) -> None:
        """Store an answer, and delete the oldest ones beyond the limit."""
        self.write(Write(PUT_ANSWER, functools.partial(_answer_row, answer), _ANSWER_BYTES))

    def keep_findings(self, findings: Findings) -> None:
        """Store the results of comparisons of semantic answers, in place of the previous ones."""
        row = (msgspec.json.encode(findings).decode(),)
        self.write(Write(_PUT_FINDINGS, lambda: row, len(row[0])))

    def keep_promises(self, records: list[PromiseRecord]) -> None:
        """Store the evidence of promises, in place of the previous one."""
        row = (msgspec.json.encode(records).decode(),)
        self.write(Write(_PUT_PROMISES, lambda: row, len(row[0])))


def _trim(database: sqlite3.Connection) -> None:
    database.execute(TRIM_ANSWERS)


def _answer_row(answer: ShadowAnswer) -> Row:
    return (msgspec.msgpack.encode(answer),)
