"""The policy in force, and how another one takes its place: verify → activate → persist by rename → report.

A bad file changes nothing but the report, which names file, line and key; the last good policy stays in force, and its
copy in the state directory is what a restart with a broken file starts with.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from router.errors import PolicyError
from router.policy.compiled import Policy, parse_policy

from ..clock import Clock

log = logging.getLogger(__name__)

DEFAULT_POLICY = Path(__file__).parents[2] / "policies" / "default.yaml"
LAST_GOOD = "policy.last-good.yaml"
_MAX_BYTES = 256 * 1024 + 1  # one more than the parser takes, so that it is the parser that refuses

Stamp = tuple[int, int, int]  # inode, size, modification time in ns


class PolicyReport(msgspec.Struct, frozen=True):
    """What is in force and what was refused last. Times are Unix seconds."""

    file: str
    name: str
    revision: str
    activated: float
    last_good: bool = False  # the file was unusable at start: this is the copy of the last good one
    refused: str = ""  # why the newest file is not in force: file, line, key
    refused_at: float | None = None
    persist_error: str = ""  # why a restart could not fall back to this policy


class _Loaded(msgspec.Struct, frozen=True):
    text: str
    policy: Policy


class PolicyStore:
    """`on_activate` is called with each policy that comes into force, the first one too; `on_load` with how it went."""

    def __init__(
        self,
        path: Path,
        *,
        state_dir: Path | None,
        clock: Clock,
        on_activate: Callable[[Policy], None] = lambda _: None,
        on_load: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self._path = path
        self._last_good = None if state_dir is None else state_dir / LAST_GOOD
        self._clock = clock
        self._on_activate = on_activate
        self._on_load = on_load
        self._stamp: Stamp | None = None
        self._active: Policy | None = None
        self._report: PolicyReport | None = None

    @property
    def active(self) -> Policy:
        assert self._active is not None, "load() comes first"
        return self._active

    @property
    def report(self) -> PolicyReport:
        assert self._report is not None, "load() comes first"
        return self._report

    def load(self) -> None:
        """At start. A bad file: the last good policy. None of that either: raises PolicyError."""
        try:
            loaded = self._read(self._path)
        except PolicyError as error:
            self._on_load(False)
            last_good = self._read_last_good()
            if last_good is None:
                raise
            self._activate(last_good, refused=error.message)
            log.error("policy refused: %s; the last good one is in force", error.message)
            return
        self._activate(loaded)
        self._persist(loaded.text)

    async def reload(self) -> None:
        """Now. Raises nothing: the report says how it went."""
        try:
            loaded = await asyncio.to_thread(self._read, self._path)
        except PolicyError as error:
            self._refuse(error)
        else:
            self._activate(loaded)
            await asyncio.to_thread(self._persist, loaded.text)

    async def poll(self) -> None:
        """Reload if the file has changed since it was read."""
        if await asyncio.to_thread(_stamp, self._path) != self._stamp:
            await self.reload()

    def _read(self, path: Path) -> _Loaded:
        """Raises PolicyError, also for a file that is not there."""
        if path == self._path:
            self._stamp = _stamp(path)  # before reading: a change in between is seen at the next poll
        try:
            with path.open("rb") as file:
                text = file.read(_MAX_BYTES).decode()
        except OSError as error:
            raise PolicyError(error.strerror or "unreadable", where=str(path)) from error
        except UnicodeDecodeError as error:
            raise PolicyError("not UTF-8", where=str(path)) from error
        return _Loaded(text, parse_policy(text, str(path)))

    def _read_last_good(self) -> _Loaded | None:
        if self._last_good is None:
            return None
        try:
            return self._read(self._last_good)
        except PolicyError:
            return None

    def _activate(self, loaded: _Loaded, *, refused: str = "") -> None:
        now = self._clock.unix()
        changed = self._active is None or self._active.revision != loaded.policy.revision
        self._active = loaded.policy
        self._on_activate(loaded.policy)
        self._report = PolicyReport(
            file=str(self._path),
            name=loaded.policy.name,
            revision=loaded.policy.revision,
            activated=now,
            last_good=bool(refused),
            refused=refused,
            refused_at=now if refused else None,
        )
        if not refused:
            self._on_load(True)
        if changed:
            log.info("policy %s@%s is in force", loaded.policy.name, loaded.policy.revision)

    def _refuse(self, error: PolicyError) -> None:
        self._on_load(False)
        log.error("policy refused: %s; %s stays in force", error.message, self.active.revision)
        self._report = msgspec.structs.replace(self.report, refused=error.message, refused_at=self._clock.unix())

    def _persist(self, text: str) -> None:
        """By rename, so that a restart never sees half a policy. A failure changes only the report."""
        if self._last_good is None:
            return
        partial = self._last_good.with_name(self._last_good.name + ".partial")
        try:
            self._last_good.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self._last_good)
        except OSError as error:
            log.warning("the policy could not be kept in %s: %s", self._last_good, error.strerror)
            self._report = msgspec.structs.replace(self.report, persist_error=error.strerror or "unwritable")


def _stamp(path: Path) -> Stamp | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return (stat.st_ino, stat.st_size, stat.st_mtime_ns)
