"""Encrypted databases of the state folder, for tests that look into them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from causeway_server.edge_node.storage.sealed import register
from causeway_server.router.serving.at_rest.sealing import head_of
from causeway_server.router.serving.at_rest.state_keys import StateKeys


@contextmanager
def database_of(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a database whose SQL can use seal, opened and keyed; commit at the end of the block."""
    database = sqlite3.connect(path)
    try:
        register(database, StateKeys(path.parent))
        with database:
            yield database
    finally:
        database.close()


class ReadableKeys(StateKeys):
    """Keys that encrypt nothing, for tests of what is deleted."""

    def seal(self, data: bytes | str, *place: str | int) -> bytes:
        return head_of("none") + (data.encode() if isinstance(data, str) else data)

    def open(self, stored: object, *place: str | int) -> bytes:
        return stored.removeprefix(head_of("none")) if isinstance(stored, bytes) else b""
