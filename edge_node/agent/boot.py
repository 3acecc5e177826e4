"""Choose the bundle that a daemon starts with: the last verified bundle, else the one before, else the factory's files.

It needs no network and no part of the fleet's software beyond this: a damaged file is a reason to start with another
bundle, never a reason not to start.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from router.bundle.protocol import BoxState
from router.bundle.refusals import BootsFailed, BundleAltered, DiskFull, UpdateRefused, Withdrawn

from .disk import Disk
from .journal import Journal, JournalRow, quarantine
from .store import BundleStore, InstalledBundle

log = logging.getLogger(__name__)

JOURNAL = "journal.jsonl"
_MAX_BOOTS = 3
_NOT_ITS_FAULT = (Withdrawn.code, DiskFull.code, BundleAltered.code)  # such a bundle may be tried again
_UNDONE = (BoxState.ROLLBACK, BoxState.QUARANTINE, BoxState.TRIAL, BoxState.ACTIVATE)
_ON_TRIAL = (BoxState.ACTIVATE, BoxState.TRIAL)


class Booted(msgspec.Struct, frozen=True):
    """The bundle to start with (None: the factory's files). `row`: the journal row that the agent continues from."""

    bundle: InstalledBundle | None
    row: JournalRow
    store: BundleStore
    journal: Journal


def boot(folder: Path, daemon_version: str, now: float, *, disk: Disk | None = None) -> Booted:
    """Choose the bundle to start with, and count this start if a bundle is on trial. Never raises for damaged files.

    1. A trial goes on, unless the daemon ended too often during it, or this start cannot be written down.
    2. A rollback that was begun is completed.
    3. Otherwise the bundle of the newest row; without a row, that of the pointer.
    4. A bundle that is damaged is passed over; the factory's files come last.

    Args:
        folder: STATE_DIR/fleet.
        now: Unix seconds.
    """
    disk = disk or Disk()
    store = BundleStore(folder, disk, daemon_version)
    journal = Journal(folder / JOURNAL, disk)
    row, pointer = journal.last, store.pointer()
    if row.state in _ON_TRIAL and row.bundle is not None and (pointer or ("",))[0] == row.bundle:
        row = _count(row, now, journal)  # (1)
    if row.state is BoxState.ROLLBACK:
        row = rolled_back(row, now)  # (2)
    elif row.state not in _ON_TRIAL or (pointer or ("",))[0] != row.bundle:
        bundles = row.bundles if journal.rows else pointer or ()  # (3)
        row = msgspec.structs.replace(row, state=BoxState.IDLE, bundles=bundles)
    # A pointer that was not moved back yet still names what was rolled back.
    others = () if row.state is BoxState.IDLE and journal.last.state in _UNDONE else pointer or ()
    candidates = tuple(b for b in dict.fromkeys((*row.bundles, *others)) if b not in row.quarantined)
    bundle, refusal = first_whole(store, candidates)  # (4)
    found = () if bundle is None else candidates[candidates.index(bundle.id) :]
    if refusal is not None and row.bundles[:1] != found[:1]:
        log.error("%s; the daemon starts with %s", refusal.message, "the bundle before" if found else "its own files")
        row = msgspec.structs.replace(row, state=BoxState.IDLE, code=refusal.code, reason=refusal.message, at=now)
    row = msgspec.structs.replace(row, bundles=found)
    if pointer != row.bundles:
        try:
            store.point(row.bundles)
        except OSError as error:  # the next start decides the same from the rows that are there
            log.error("the fleet's pointer cannot be written: %s", error.strerror or error)
            return Booted(bundle, row, store, journal)
    _write(journal, row)
    return Booted(bundle, row, store, journal)


def rolled_back(row: JournalRow, now: float) -> JournalRow:
    """Return the row of a box that has returned to the bundle before the one in `row.bundle`."""
    assert row.bundle is not None
    bundles = tuple(bundle for bundle in row.bundles if bundle != row.bundle)
    quarantined = row.quarantined
    if row.code not in _NOT_ITS_FAULT:
        quarantined = quarantine(quarantined, row.bundle, f"{row.code}: {row.reason}")
    return msgspec.structs.replace(
        row, state=BoxState.IDLE, at=now, bundle=None, bundles=bundles, quarantined=quarantined, boots=0, restarts=False
    )


def _write(journal: Journal, row: JournalRow) -> bool:
    """Append a row that is new; return whether it is on the disk."""
    if row == journal.last:
        return True
    try:
        journal.append(row)
    except OSError as error:
        log.error("the fleet's journal cannot be written: %s", error.strerror or error)
        return False
    return True


def _count(row: JournalRow, now: float, journal: Journal) -> JournalRow:
    assert row.bundle is not None
    boots = row.boots + (not row.restarts)
    bundles = tuple(dict.fromkeys((row.bundle, *row.bundles)))
    row = msgspec.structs.replace(
        row, state=BoxState.TRIAL, at=now, boots=boots, restarts=False, bundles=bundles, code="", reason=""
    )
    if boots <= _MAX_BOOTS and _write(journal, row):
        return row
    code, reason = DiskFull.code, "the start of a trial cannot be written down, so that it would never end"
    if boots > _MAX_BOOTS:
        code, reason = BootsFailed.code, f"the daemon ended {boots} times during the trial"
    log.error("bundle %s is rolled back: %s", row.bundle, reason)
    row = msgspec.structs.replace(row, state=BoxState.ROLLBACK, code=code, reason=reason)
    _write(journal, row)
    return row


def first_whole(store: BundleStore, bundles: tuple[str, ...]) -> tuple[InstalledBundle | None, UpdateRefused | None]:
    """Return the first bundle that can be used, and why the first of all cannot."""
    first: UpdateRefused | None = None
    for bundle in bundles:
        try:
            return store.load(bundle), first
        except UpdateRefused as error:
            first = first or error
    return None, first
