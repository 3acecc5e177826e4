"""The agent's states, and the journal: a synced row before each effect, so that a restart knows what was begun.

Each row is everything that the agent remembers, with a checksum. The last whole row counts; a row that a power cut left
half written is none. IDLE and CHECK change nothing and write no row of their own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import Enum, auto
from pathlib import Path

import msgspec

from router.bundle.protocol import BoxState
from router.bundle.refusals import (
    CasesFailed,
    DiskFull,
    ModelTooLarge,
    ModelUnusable,
    PolicyUnusable,
    RequestsLeave,
    UpdateRefused,
    Withdrawn,
)

from ..observability.metrics import BoxCondition
from .disk import Disk

KEPT_ROWS = 64
MAX_QUARANTINED = 64
_COMPACT_BYTES = 1024 * 1024
_DIGITS = 16
_UNFIT = (CasesFailed, ModelTooLarge, ModelUnusable, PolicyUnusable, RequestsLeave)
_TRIED_AGAIN = (BoxState.COMMIT, BoxState.ROLLBACK, BoxState.QUARANTINE)


class Event(Enum):
    """The end of a state; `TRANSITIONS` names the next one."""

    BEGIN = auto()  # time to look, or something may be new
    NOTHING = auto()  # the box runs what it should, or may not change yet
    FOUND = auto()  # the plan assigns another bundle
    DONE = auto()
    REFUSED = auto()  # the update is not usable now; the next look tries again
    UNFIT = auto()  # this box can never run this bundle
    FAILED = auto()
    WITHDRAWN = auto()  # the plan no longer assigns the bundle that is on trial
    RESTARTED = auto()  # the daemon started anew


TRANSITIONS: Mapping[BoxState, Mapping[Event, BoxState]] = {
    BoxState.IDLE: {Event.BEGIN: BoxState.CHECK},
    BoxState.CHECK: {Event.NOTHING: BoxState.IDLE, Event.REFUSED: BoxState.IDLE, Event.FOUND: BoxState.FETCH},
    # Until the pointer moves, nothing is in use: after a restart the next look begins anew, with the files that are
    # there.
    BoxState.FETCH: {
        Event.DONE: BoxState.VERIFY,
        Event.REFUSED: BoxState.IDLE,
        Event.RESTARTED: BoxState.IDLE,
    },
    BoxState.VERIFY: {
        Event.DONE: BoxState.DRY_RUN,
        Event.REFUSED: BoxState.IDLE,
        Event.RESTARTED: BoxState.IDLE,
    },
    BoxState.DRY_RUN: {
        Event.DONE: BoxState.STAGE,
        Event.UNFIT: BoxState.QUARANTINE,
        Event.REFUSED: BoxState.IDLE,
        Event.RESTARTED: BoxState.IDLE,
    },
    BoxState.STAGE: {Event.DONE: BoxState.ACTIVATE, Event.REFUSED: BoxState.IDLE, Event.RESTARTED: BoxState.IDLE},
    # The pointer may have moved: if it has, a restart continues the trial, else nothing happened.
    BoxState.ACTIVATE: {
        Event.DONE: BoxState.TRIAL,
        Event.FAILED: BoxState.ROLLBACK,
        Event.REFUSED: BoxState.IDLE,
        Event.RESTARTED: BoxState.TRIAL,
    },
    # A daemon that ends during a trial counts: after some boots the bundle has failed.
    BoxState.TRIAL: {
        Event.DONE: BoxState.COMMIT,
        Event.FAILED: BoxState.ROLLBACK,
        Event.WITHDRAWN: BoxState.ROLLBACK,
        Event.RESTARTED: BoxState.TRIAL,
    },
    BoxState.COMMIT: {Event.DONE: BoxState.IDLE, Event.RESTARTED: BoxState.IDLE},
    BoxState.ROLLBACK: {
        Event.DONE: BoxState.QUARANTINE,
        Event.WITHDRAWN: BoxState.IDLE,
        Event.RESTARTED: BoxState.IDLE,  # the start completes it
    },
    BoxState.QUARANTINE: {Event.DONE: BoxState.IDLE, Event.RESTARTED: BoxState.IDLE},
}
"""A missing event cannot happen in that state."""


def event_of(refusal: UpdateRefused, state: BoxState, *, pointed: bool) -> Event | None:
    """Return the event by which a refusal ends a state; None: the disk cannot be written, the same step again.

    Args:
        pointed: The pointer names the bundle that the box changes to.
    """
    events = TRANSITIONS[state]
    if state in _TRIED_AGAIN or (state is BoxState.TRIAL and isinstance(refusal, DiskFull)):
        return None
    if isinstance(refusal, Withdrawn) and Event.WITHDRAWN in events:
        return Event.WITHDRAWN
    if isinstance(refusal, _UNFIT) and Event.UNFIT in events:
        return Event.UNFIT
    return Event.FAILED if Event.FAILED in events and pointed else Event.REFUSED


MEANING: Mapping[BoxState, str] = {
    BoxState.IDLE: "waits for the next look: when the control plane wakes it, at the latest after 15 minutes",
    BoxState.CHECK: "verifies signatures, reads the plan, and the manifest of the bundle that it assigns",
    BoxState.FETCH: "fetches the files that are missing; what a broken download brought is kept",
    BoxState.VERIFY: "hashes each file and gives it its name in the store",
    BoxState.DRY_RUN: "runs the cases, checks the models' memory and signals, replays its decisions of the last day",
    BoxState.STAGE: "builds the bundle's folder, and waits until it may change",
    BoxState.ACTIVATE: "moves the pointer; loads new models beside the old ones and asks their golden prompts",
    BoxState.TRIAL: "serves with the bundle and compares requests, health and heat with the time before",
    BoxState.COMMIT: "keeps the bundle, and removes files that no kept bundle needs",
    BoxState.ROLLBACK: "returns to the bundle before, or to the factory's files",
    BoxState.QUARANTINE: "notes the reason; the bundle is not tried again",
}


class JournalRow(msgspec.Struct, frozen=True):
    """The agent's memory at the start of a state.

    Attributes:
        state: The state that begins with this row.
        at: Unix seconds.
        bundle: The bundle that the box changes to.
        rollout: The rollout that assigned it.
        bundles: The pointer as it was: the running bundle first, then those to return to.
        code: Why the last update was refused or undone, or `requests_leave` of one that goes on; "" otherwise.
        reason: The reason for people.
        boots: Unexpected starts of the daemon during this trial.
        restarts: The agent itself asked for the next start.
        unproven: The running bundle was committed without enough requests to prove it.
        quarantined: The reason, by bundle that this box does not try again; the oldest first.
        before: The time before the change, which the trial compares with.
        signed_at: The newest signed time that was seen, Unix seconds; the time is at least this.
    """

    state: BoxState = BoxState.IDLE
    at: float = 0.0
    bundle: str | None = None
    rollout: str = ""
    bundles: tuple[str, ...] = ()
    code: str = ""
    reason: str = ""
    boots: int = 0
    restarts: bool = False
    unproven: bool = False
    quarantined: dict[str, str] = {}
    before: BoxCondition | None = None
    signed_at: float = 0.0


class Journal:
    """The rows of one box, in one file. Appends fail with OSError; `last` is then what it was."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self._path = path
        self._disk = disk
        content = _read(path)
        self._rows = _rows_of(content)
        self._damaged = bool(content) and not content.endswith(b"\n")  # the next row must not continue a half one

    @property
    def last(self) -> JournalRow:
        return self._rows[-1] if self._rows else JournalRow()

    @property
    def rows(self) -> tuple[JournalRow, ...]:
        """The newest rows, oldest first, for people."""
        return tuple(self._rows)

    def append(self, row: JournalRow) -> None:
        """Write a row and sync it.

        Raises:
            OSError: It is not on the disk, for example because that is full.
        """
        try:
            if self._is_large():
                self._disk.replace_synced(self._path, b"".join(map(_encode, (*self._rows[1 - KEPT_ROWS :], row))))
            else:
                self._disk.append_synced(self._path, b"\n" * self._damaged + _encode(row))
        except OSError:
            self._damaged = True
            raise
        self._damaged = False
        self._rows = [*self._rows[1 - KEPT_ROWS :], row]

    def _is_large(self) -> bool:
        try:
            return self._path.stat().st_size > _COMPACT_BYTES
        except OSError:
            return False


def quarantine(quarantined: Mapping[str, str], bundle: str, reason: str) -> dict[str, str]:
    """Return the quarantined bundles with one more; beyond the limit the oldest is dropped."""
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
            continue  # of another version
    return rows[-KEPT_ROWS:]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
