"""The lock of the process that runs the controller; the lock ends with the process.

PostgreSQL: an advisory lock of one connection. SQLite: a lock on a file beside the database. The locks only save work
and double publications; two controllers could not both change a rollout, see `change_rollout`.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

_LOCK = 0x63747264
Still = Callable[[], Awaitable[None]]
"""Raises StoreUnavailable if the lock was lost with its connection."""


async def try_lock(connection: AsyncConnection) -> bool:
    """Take the lock of a PostgreSQL connection; it is held until the connection closes."""
    return bool(await connection.scalar(text("SELECT pg_try_advisory_lock(:lock)"), {"lock": _LOCK}))


@asynccontextmanager
async def file_lock(path: str) -> AsyncIterator[bool]:
    """Yield whether this process now holds the lock of a file."""
    handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(handle)
