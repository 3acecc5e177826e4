"""Requests and results, each in pages of its own, so that nothing of them stays when they are deleted.

SQLite fills freed pages with zeros (`secure_delete`). A row that shares its page may leave a copy there when rows move
to other pages. Of a long row SQLite keeps only the start in the shared page and the rest in overflow pages, which are
the row's alone: zeros fill the start, and the content begins with the first overflow page.
See "Cell Payload Overflow Pages" in https://www.sqlite.org/fileformat2.html
"""

from __future__ import annotations

import sqlite3
from typing import Literal

PAGE_BYTES = 1024  # of the file; a body wastes half a page
_OVERFLOW_BYTES = PAGE_BYTES - 4  # of content in an overflow page
# The least that SQLite keeps of a row in the shared page, without 3 bytes of the row's header. The others of the header
# (its last number has 1 to 5 bytes) are added to what is kept, if the rest fills its overflow pages.
_SHARED_BYTES = (PAGE_BYTES - 12) * 32 // 255 - 23 - 3
Table = Literal["requests", "results"]


class OutboxBodies:
    """Stores and deletes bodies. `deletions` counts what was deleted, also in transactions that were undone."""

    def __init__(self) -> None:
        self.deletions = 0

    def put(self, db: sqlite3.Connection, table: Table, seq: int, body: bytes) -> None:
        filled = bytes(_SHARED_BYTES) + body + bytes(-len(body) % _OVERFLOW_BYTES)
        db.execute(f"INSERT INTO {table} VALUES (?, ?)", (seq, filled))

    def delete(self, db: sqlite3.Connection, table: Table, seq: int) -> None:
        self.deletions += db.execute(f"DELETE FROM {table} WHERE seq = ?", (seq,)).rowcount


def body_of(stored: bytes, size: int) -> bytes:
    """Return the body of `size` bytes that a row holds."""
    return stored[_SHARED_BYTES : _SHARED_BYTES + size]
