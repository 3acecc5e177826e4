"""Encryption of the state folder: at the start of what earlier versions left readable; the rotation of its key."""

from __future__ import annotations

import asyncio
import logging
import sqlite3

from causeway_server.router.errors import CausewayError
from causeway_server.router.serving.at_rest.state_keys import StateKeys
from causeway_server.router.serving.logs import redacted

from ..files.store import DeviceFileStore
from ..storage.sealed import SEALED, encrypt_folder, reseal_rows

log = logging.getLogger(__name__)
_PAUSE_S = 0.02  # between two transactions, for the stores


def open_folder(keys: StateKeys) -> None:
    """Check the folder's keys, and encrypt what earlier versions left readable. Blocking. Raises ConfigError if the
    folder's key is missing, or is another one.
    """
    try:
        keys.check()
    except OSError as error:
        log.error("The keys of the state folder cannot be read: %s", error)
        return
    encrypt_folder(keys)


async def rotate_keys(keys: StateKeys, files: DeviceFileStore, rotate_s: float) -> None:
    """Replace a data key older than `rotate_s`; encrypt content of old keys again, and forget those that nothing needs.
    An interruption is continued by the next call. Faults are logged.
    """
    if not keys.made:
        return
    try:
        known = keys.head
        await asyncio.to_thread(keys.check)
        if keys.age_s >= rotate_s:
            await asyncio.to_thread(keys.rotate)
        if keys.count == 1:
            return
        changed = await files.reseal() + (keys.head != known)  # what the old key sealed just now may not be stored yet
        for path in (keys.folder / name for name in SEALED):
            rows = reseal_rows(path, keys) if path.exists() else iter(())
            while (count := await asyncio.to_thread(next, rows, None)) is not None:
                changed += count
                await asyncio.sleep(_PAUSE_S)
        if not changed:
            await asyncio.to_thread(keys.retire)
            log.info("The state folder is now encrypted with its newest key only.")
    except (CausewayError, OSError, sqlite3.Error) as error:
        log.warning("The old key of the state folder is not replaced yet: %s", redacted(error))
