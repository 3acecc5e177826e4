"""The agent's states, its journal, and the bundle that a daemon starts with.

A row of the journal is synced before each effect, so that a restart knows what was in progress. Each row is the agent's
whole memory, with a checksum. The last complete row counts; a row that a power cut left incomplete is ignored. IDLE and
CHECK change nothing and write no rows.

`boot` chooses the last verified bundle, else the previous one, else the factory files. It needs neither the network nor
any other code of the fleet: a damaged file makes the daemon start with another bundle, and never prevents a start.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from enum import Enum, auto
from pathlib import Path

import msgspec

from causeway_server.router.bundle.protocol import DeviceState
from causeway_server.router.bundle.refusals import (
    BootsFailed,
    BundleAltered,
    CasesFailed,
    DiskFull,
    ModelTooLarge,
    ModelUnusable,
    PolicyUnusable,
    RequestsLeave,
    UpdateRefused,
    Withdrawn,
)
from causeway_server.router.documents.data import table_of

from ..observability.metrics import DeviceCondition
from .store import BundleStore, Disk, InstalledBundle

log = logging.getLogger(__name__)

JOURNAL = "journal.jsonl"
_MAX_BOOTS = 3
# refusals after which the same bundle may be tried again
_NOT_ITS_FAULT = (Withdrawn.code, DiskFull.code, BundleAltered.code)
_UNDONE = (DeviceState.ROLLBACK, DeviceState.QUARANTINE, DeviceState.TRIAL, DeviceState.ACTIVATE)
_ON_TRIAL = (DeviceState.ACTIVATE, DeviceState.TRIAL)
KEPT_ROWS = 64
MAX_QUARANTINED = 64
_COMPACT_BYTES = 1024 * 1024
_DIGITS = 16
_UNFIT = (CasesFailed, ModelTooLarge, ModelUnusable, PolicyUnusable, RequestsLeave)
_TRIED_AGAIN = (DeviceState.COMMIT, DeviceState.ROLLBACK, DeviceState.QUARANTINE)


class Event(Enum):
    """The end of a state; `TRANSITIONS` gives the next one."""

    BEGIN = auto()  # a check is due, or there may be an update
    NOTHING = auto()  # the device runs the assigned bundle, or may not change yet
    FOUND = auto()  # the plan assigns another bundle
    DONE = auto()
    REFUSED = auto()  # the update is not usable now; the next check tries again
    UNFIT = auto()  # this device can never run this bundle
    FAILED = auto()
    WITHDRAWN = auto()  # the plan no longer assigns the bundle on trial
    RESTARTED = auto()  # the daemon restarted


_ENDS = {Event.REFUSED: DeviceState.IDLE, Event.RESTARTED: DeviceState.IDLE}
TRANSITIONS: Mapping[DeviceState, Mapping[Event, DeviceState]] = {
    DeviceState.IDLE: {Event.BEGIN: DeviceState.CHECK},
    DeviceState.CHECK: {
        Event.NOTHING: DeviceState.IDLE,
        Event.REFUSED: DeviceState.IDLE,
        Event.FOUND: DeviceState.FETCH,
    },
    # Until the pointer moves, nothing is in use: after a restart the next check begins again, and reuses the files that
    # were already downloaded.
    DeviceState.FETCH: {Event.DONE: DeviceState.VERIFY, **_ENDS},
    DeviceState.VERIFY: {Event.DONE: DeviceState.DRY_RUN, **_ENDS},
    DeviceState.DRY_RUN: {Event.DONE: DeviceState.STAGE, Event.UNFIT: DeviceState.QUARANTINE, **_ENDS},
    DeviceState.STAGE: {Event.DONE: DeviceState.ACTIVATE, **_ENDS},
    # The pointer may have moved: if it has, a restart continues the trial; otherwise nothing has changed.
    DeviceState.ACTIVATE: {
        Event.DONE: DeviceState.TRIAL,
        Event.FAILED: DeviceState.ROLLBACK,
        Event.REFUSED: DeviceState.IDLE,
        Event.RESTARTED: DeviceState.TRIAL,
    },
    # A restart during a trial is counted: after several of them the bundle has failed.
    DeviceState.TRIAL: {
        Event.DONE: DeviceState.COMMIT,
        Event.FAILED: DeviceState.ROLLBACK,
        Event.WITHDRAWN: DeviceState.ROLLBACK,
        Event.RESTARTED: DeviceState.TRIAL,
    },
    DeviceState.COMMIT: {Event.DONE: DeviceState.IDLE, Event.RESTARTED: DeviceState.IDLE},
    DeviceState.ROLLBACK: {
        Event.DONE: DeviceState.QUARANTINE,
        Event.WITHDRAWN: DeviceState.IDLE,
        Event.RESTARTED: DeviceState.IDLE,  # the start of the daemon completes it
    },
    DeviceState.QUARANTINE: {Event.DONE: DeviceState.IDLE, Event.RESTARTED: DeviceState.IDLE},
}
"""The next state by state and event. An event that is not listed is impossible in that state."""


def event_of(refusal: UpdateRefused, state: DeviceState, *, pointed: bool) -> Event | None:
    """Return the event by which a refusal ends a state; None if the disk is not writable and the step must be repeated.
    `pointed`: whether the pointer names the bundle that is being installed.
    """
    events = TRANSITIONS[state]
    if state in _TRIED_AGAIN or (state is DeviceState.TRIAL and isinstance(refusal, DiskFull)):
        return None
    if isinstance(refusal, Withdrawn) and Event.WITHDRAWN in events:
        return Event.WITHDRAWN
    if isinstance(refusal, _UNFIT) and Event.UNFIT in events:
        return Event.UNFIT
    return Event.FAILED if Event.FAILED in events and pointed else Event.REFUSED


MEANING = table_of(__package__, "states.json", dict[DeviceState, str])


class JournalRow(msgspec.Struct, frozen=True):
    """The agent's memory at the start of a state. `code`: error code of the last refused or undone update, or
    `requests_leave` for one that continues; "" otherwise. `quarantined`: bundles, oldest first, with the reason why
    this device does not try them again.
    """

    state: DeviceState = DeviceState.IDLE  # the state that begins with this row
    at: float = 0.0  # Unix seconds
    bundle: str | None = None  # the bundle that the device changes to
    rollout: str = ""
    bundles: tuple[str, ...] = ()  # the previous pointer: first the running bundle, then the bundles to return to
    code: str = ""
    reason: str = ""  # Human-readable reason
    boots: int = 0  # unexpected starts of the daemon during this trial
    restarts: bool = False  # whether the agent itself asked for the next start
    unproven: bool = False  # whether the running bundle was committed without enough requests to prove it
    quarantined: dict[str, str] = {}
    before: DeviceCondition | None = None  # the condition before the change, with which the trial compares
    signed_at: float = 0.0  # the newest signed time seen, Unix seconds; the present is not earlier


class Journal:
    """The rows of one device, in one file. A failed append raises OSError and leaves `last` unchanged."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self._path = path
        self._disk = disk
        content = _read(path)
        self._rows = _rows_of(content)
        # the next row must not continue an incomplete one
        self._damaged = bool(content) and not content.endswith(b"\n")

    @property
    def last(self) -> JournalRow:
        return self._rows[-1] if self._rows else JournalRow()

    @property
    def rows(self) -> tuple[JournalRow, ...]:
        """Return the newest rows, oldest first, for display."""
        return tuple(self._rows)

    def append(self, row: JournalRow) -> None:
        """Write a row and sync it. Raises OSError, for example if the disk is full."""
        try:
            if self._path.exists() and self._path.stat().st_size > _COMPACT_BYTES:
                self._disk.replace_synced(self._path, b"".join(map(_encode, (*self._rows[1 - KEPT_ROWS :], row))))
            else:
                self._disk.append_synced(self._path, b"\n" * self._damaged + _encode(row))
        except OSError:
            self._damaged = True
            raise
        self._damaged = False
        self._rows = [*self._rows[1 - KEPT_ROWS :], row]


def quarantine(quarantined: Mapping[str, str], bundle: str, reason: str) -> dict[str, str]:
    """Return the quarantined bundles with `bundle` added; beyond the limit the oldest is dropped."""
    others = {known: why for known, why in quarantined.items() if known != bundle}
    return dict([*others.items(), (bundle, reason)][-MAX_QUARANTINED:])


def _encode(row: JournalRow) -> bytes:
    body = msgspec.json.encode(row)
    return hashlib.sha256(body).hexdigest()[:_DIGITS].encode() + b" " + body + b"\n"


def _rows_of(content: bytes) -> list[JournalRow]:
    rows = []
    for line in content.split(b"\n")[-2 * KEPT_ROWS :]:
        body = line[_DIGITS + 1 :]
        if hashlib.sha256(body).hexdigest()[:_DIGITS].encode() != line[:_DIGITS]:
            continue
        try:
            rows.append(msgspec.json.decode(body, type=JournalRow))
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue  # a row of another version
    return rows[-KEPT_ROWS:]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


class BootState(msgspec.Struct, frozen=True):
    """The bundle to start with (None for the factory files). `row`: the journal row from which the agent continues."""

    bundle: InstalledBundle | None
    row: JournalRow
    store: BundleStore
    journal: Journal


def boot(folder: Path, daemon_version: str, now: float, *, disk: Disk | None = None) -> BootState:
    """Choose the bundle to start with, and count this start if a bundle is on trial. Never raise for damaged files.

    1. A trial continues, unless the daemon ended too often during it, or this start cannot be recorded.
    2. A rollback that was begun is completed.
    3. Otherwise the bundle of the newest row; without a row, that of the pointer.
    4. A damaged bundle is skipped; the factory files come last.
    """
    disk = disk or Disk()
    store = BundleStore(folder, disk, daemon_version)
    journal = Journal(folder / JOURNAL, disk)
    row, pointer = journal.last, store.pointer()
    if row.state in _ON_TRIAL and row.bundle is not None and (pointer or ("",))[0] == row.bundle:
        row = _count(row, now, journal)  # (1)
    if row.state is DeviceState.ROLLBACK:
        row = rolled_back(row, now)  # (2)
    elif row.state not in _ON_TRIAL or (pointer or ("",))[0] != row.bundle:
        bundles = row.bundles if journal.rows else pointer or ()  # (3)
        row = msgspec.structs.replace(row, state=DeviceState.IDLE, bundles=bundles)
    # A pointer that has not been moved back yet still names the bundle that was rolled back.
    others = () if row.state is DeviceState.IDLE and journal.last.state in _UNDONE else pointer or ()
    candidates = tuple(b for b in dict.fromkeys((*row.bundles, *others)) if b not in row.quarantined)
    bundle, refusal = first_whole(store, candidates)  # (4)
    remaining = () if bundle is None else candidates[candidates.index(bundle.id) :]
    if refusal is not None and row.bundles[:1] != remaining[:1]:
        log.error(
            "%s; the daemon starts with %s.",
            refusal.message,
            "the previous bundle" if remaining else "the factory files",
        )
        row = msgspec.structs.replace(row, state=DeviceState.IDLE, code=refusal.code, reason=refusal.message, at=now)
    row = msgspec.structs.replace(row, bundles=remaining)
    if pointer != row.bundles:
        try:
            store.point(row.bundles)
        except OSError as error:  # the next start decides the same from the existing rows
            log.error("The file that names the fleet's bundles cannot be written: %s", error.strerror or error)
            return BootState(bundle, row, store, journal)
    _write(journal, row)
    return BootState(bundle, row, store, journal)


def rolled_back(row: JournalRow, now: float) -> JournalRow:
    """Return the row of a device that has returned from `row.bundle` to the previous bundle."""
    assert row.bundle is not None
    bundles = tuple(bundle for bundle in row.bundles if bundle != row.bundle)
    quarantined = row.quarantined
    if row.code not in _NOT_ITS_FAULT:
        quarantined = quarantine(quarantined, row.bundle, f"{row.code}: {row.reason}")
    return msgspec.structs.replace(
        row,
        state=DeviceState.IDLE,
        at=now,
        bundle=None,
        bundles=bundles,
        quarantined=quarantined,
        boots=0,
        restarts=False,
    )


def _write(journal: Journal, row: JournalRow) -> bool:
    """Append a row unless it equals the last one; return whether it is on the disk."""
    if row == journal.last:
        return True
    try:
        journal.append(row)
    except OSError as error:
        log.error("The fleet's journal cannot be written: %s", error.strerror or error)
        return False
    return True


def _count(row: JournalRow, now: float, journal: Journal) -> JournalRow:
    assert row.bundle is not None
    boots = row.boots + (not row.restarts)
    bundles = tuple(dict.fromkeys((row.bundle, *row.bundles)))
    row = msgspec.structs.replace(
        row, state=DeviceState.TRIAL, at=now, boots=boots, restarts=False, bundles=bundles, code="", reason=""
    )
    if boots <= _MAX_BOOTS and _write(journal, row):
        return row
    code, reason = DiskFull.code, "the start of a trial cannot be recorded, so the trial would never end"
    if boots > _MAX_BOOTS:
        code, reason = BootsFailed.code, f"the daemon ended {boots} times during the trial"
    log.error("Bundle %s is rolled back: %s", row.bundle, reason)
    row = msgspec.structs.replace(row, state=DeviceState.ROLLBACK, code=code, reason=reason)
    _write(journal, row)
    return row


def first_whole(store: BundleStore, bundles: tuple[str, ...]) -> tuple[InstalledBundle | None, UpdateRefused | None]:
    """Return the first undamaged bundle, and the fault of the first bundle."""
    first: UpdateRefused | None = None
    for bundle in bundles:
        try:
            return store.load(bundle), first
        except UpdateRefused as error:
            first = first or error
    return None, first
