"""Revocations outlive a database that was restored from a backup: a copy of them lies beside what is published.

`published/revocations.json` maps tenant/device to the Unix time of the revocation. What the store has is added to the
copy; what only the copy has was lost by the store, and is revoked there again, also if the device is not known there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec
from anyio import to_thread

from ..store.audit import append_audit
from ..store.database import Store
from ..store.generations import KEPT_S, read_revocations, revoke_owner
from ..trust.files import write_atomically
from ..trust.published import PUBLISHED

REVOCATIONS_FILE = "revocations.json"
_log = logging.getLogger("causeway.fleet.controller")


class RevocationKeeper:
    """Keeps the copy and the store equal.

    Args:
        store: The database.
        folder: The fleet's folder.
        actor: The author of what is revoked again, for the audit log.
    """

    def __init__(self, store: Store, folder: Path, actor: str) -> None:
        self._store = store
        self._path = folder / PUBLISHED / REVOCATIONS_FILE
        self._actor = actor

    async def keep(self, now: float) -> None:
        """Revoke again what the store has lost, and write what the copy lacks.

        Args:
            now: Unix seconds. Lost revocations count from now: tokens that were issued after the loss are refused too.

        Raises:
            StoreUnavailable: The database is away.
            OSError: The copy cannot be read or written.
        """
        kept = await to_thread.run_sync(self._read)
        async with self._store.read() as connection:
            found = (await read_revocations(connection)).devices
        lost = sorted(owner for owner, at in (kept or {}).items() if owner not in found and at >= now - KEPT_S)
        if lost:
            async with self._store.write() as connection:
                for owner in lost:
                    await revoke_owner(connection, owner, now)
                    what = {"device": owner.partition("/")[2], "reason": "the restored database did not know it"}
                    await append_audit(connection, now, self._actor, "device.revoked_again", what)
                found = (await read_revocations(connection)).devices
            _log.error("the store did not know %d revocations: restored? They hold again", len(lost))
        if found != kept:
            await to_thread.run_sync(self._write, found)

    def _read(self) -> dict[str, float] | None:
        """Return the copy, None if it is damaged."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, float])
        except FileNotFoundError:
            return {}
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            _log.error("%s is damaged and is written anew from the database: %s", self._path, error)
            return None

    def _write(self, revoked: Mapping[str, float]) -> None:
        write_atomically(self._path, msgspec.json.encode(revoked, order="sorted"))
