"""Operators' sessions. Only hashes of their secrets are kept."""

from __future__ import annotations

import hashlib
import secrets

from sqlalchemy import RowMapping, delete, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from .tables import sessions

PREFIX = "cwsession_"  # for secret scanners


async def new_session(connection: AsyncConnection, operator: str, role: str, now: float, lifetime_s: float) -> str:
    """Begin a session and return its secret, which cannot be read again. Sessions that have ended are deleted.

    Args:
        connection: The connection of a transaction.
        operator: The name for the audit log.
        role: The operator's role.
        now: Unix seconds.
        lifetime_s: How long the session lasts, in seconds.
    """
    secret = PREFIX + secrets.token_urlsafe(32)
    row = {"hash": _hash(secret), "operator": operator, "role": role, "began": now, "expires": now + lifetime_s}
    await connection.execute(delete(sessions).where(sessions.c.expires <= now))
    await connection.execute(insert(sessions).values(row))
    return secret


async def find_session(connection: AsyncConnection, secret: str, now: float) -> RowMapping | None:
    """Return `name` and `role` of the session's operator; None: there is no such session, or it has ended."""
    chosen = select(sessions.c.operator.label("name"), sessions.c.role)
    found = await connection.execute(chosen.where(sessions.c.hash == _hash(secret), sessions.c.expires > now))
    return found.mappings().first()


async def end_session(connection: AsyncConnection, secret: str) -> None:
    await connection.execute(delete(sessions).where(sessions.c.hash == _hash(secret)))


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
