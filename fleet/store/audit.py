"""The append-only audit log: each row is written in the transaction of the change that it records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import insert, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from .history import AuditRow, next_row
from .tables import audit

_MAX_ROWS = 200  # rows about a rollout
_LOCK = 0x61756474  # an advisory lock, which serialises appending to the chain
_COLUMNS = [audit.c[name] for name in ("n", "at", "actor", "action", "what_json", "previous", "hash")]


async def append_audit(connection: AsyncConnection, at: float, actor: str, action: str, what: object) -> AuditRow:
    """Append the row that `next_row` makes, in the transaction of the change."""
    if connection.dialect.name == "postgresql":
        await connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
    last = (await connection.execute(select(*_COLUMNS).order_by(audit.c.n.desc()).limit(1))).first()
    row = next_row(None if last is None else _row(last), at, actor, action, what)
    columns = msgspec.structs.asdict(row)
    await connection.execute(insert(audit).values(columns | {"what_json": bytes(columns.pop("what")).decode()}))
    return row


async def read_audit(connection: AsyncConnection, after: int = 0, limit: int = 500) -> list[AuditRow]:
    """Return rows in order, beginning after row `after`."""
    chosen = select(*_COLUMNS).where(audit.c.n > after).order_by(audit.c.n).limit(limit)
    return [_row(row) for row in await connection.execute(chosen)]


async def audit_of(connection: AsyncConnection, rollout: str) -> list[AuditRow]:
    """Return the newest rows that name a rollout, oldest first."""
    named = audit.c.what_json.contains(f'"rollout":"{rollout}"', autoescape=True)
    rows = await connection.execute(select(*_COLUMNS).where(named).order_by(audit.c.n.desc()).limit(_MAX_ROWS))
    return [_row(row) for row in rows][::-1]


def _row(row: Sequence[Any]) -> AuditRow:
    n, at, actor, action, what, *hashes = row
    return AuditRow(n, at, actor, action, msgspec.Raw(what), *hashes)
