"""The active policy and its replacement: verify → activate → persist by rename → report.

An invalid file changes only the report, which names file, line and key; the active policy stays. A copy of the last
good policy in the state folder lets the daemon restart while the policy file is invalid.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

import msgspec

from causeway_server.router.errors import PolicyError
from causeway_server.router.policy.compiled import (
    ModelAdapters,
    ModelTemperature,
    Policy,
    parse_policy,
    with_adapters,
    with_clouds,
)
from causeway_server.router.serving.folders import file_version, write_atomically

from ..clock import Clock

log = logging.getLogger(__name__)

DEFAULT_POLICY = Path(__file__).parents[2] / "policies" / "default.yaml"
LAST_GOOD = "policy.last-good.yaml"
_MAX_BYTES = 256 * 1024 + 1  # one more than the parser accepts, so that the parser reports the error


class PolicyReport(msgspec.Struct, frozen=True):
    """The active policy and the last rejected file, as `/readyz` shows them. Times are Unix seconds.

    Attributes:
        file: The path of the policy file.
        name: The active policy's name.
        revision: The active policy's revision.
        activated: Time of its activation.
        last_good: Whether it is the last good copy, because the file was invalid at start.
        refused: Why the newest file was rejected: file, line and key; "" if it is active.
        refused_at: Time of the newest rejection.
        persist_error: Why the policy could not be copied to the state folder; "" if it was.
    """

    file: str
    name: str
    revision: str
    activated: float
    last_good: bool = False
    refused: str = ""
    refused_at: float | None = None
    persist_error: str = ""


class _Loaded(msgspec.Struct, frozen=True):
    text: str
    policy: Policy


@dataclass(eq=False, repr=False)
class PolicyStore:
    """The policy file of one daemon.

    Args:
        on_activate: Function that is called with each policy that becomes active, including the first one.
        on_load: Function that is called after each read of the file, with whether it was valid.
        model_temperature: Function that returns the temperature of an edge target that declares none.
    """

    path: Path  # the policy file
    _: KW_ONLY
    state_dir: Path | None  # folder for the last good policy; None: it is not kept
    clock: Clock  # Wall-clock time, for the report
    on_activate: Callable[[Policy], None] = lambda _: None
    on_load: Callable[[bool], None] = lambda _: None
    model_temperature: ModelTemperature = lambda _: None
    model_adapters: ModelAdapters = lambda _: None  # function that returns the adapters of an edge target's model
    clouds: tuple[str, ...] = ()  # names of the device's clouds; the first is that of targets `at: cloud`
    text: str = field(default="", init=False)  # the active policy, as its file has it
    _file_version: tuple[int, int, int] | None = None
    _active: Policy | None = None
    _report: PolicyReport | None = None

    def __post_init__(self) -> None:
        self._last_good = None if self.state_dir is None else self.state_dir / LAST_GOOD

    @property
    def active(self) -> Policy:
        assert self._active is not None, "call load() first"
        return self._active

    @property
    def report(self) -> PolicyReport:
        assert self._report is not None, "call load() first"
        return self._report

    @property
    def persist_problem(self) -> str:
        """The reason why a restart would fail with this policy file; "" if the active policy is stored."""
        error = self.report.persist_error
        return f"the policy could not be copied to {self._last_good}: {error}" if error else ""

    def load(self) -> None:
        """Activate the policy file at start, or the last good one if it is invalid. Raises PolicyError without one."""
        try:
            loaded = self._read(self.path)
        except PolicyError as error:
            self.on_load(False)
            last_good = self._read_last_good()
            if last_good is None:
                raise
            self._activate(last_good, refused=error.message)
            log.error("The policy was rejected, so the last good policy stays active. The reason: %s", error.message)
            return
        self._activate(loaded)
        self._persist(loaded.text)

    async def reload(self) -> None:
        """Read the file now. Never raise: the report holds the result."""
        try:
            loaded = await asyncio.to_thread(self._read, self.path)
        except PolicyError as error:
            self._reject(error)
        else:
            self._activate(loaded)
            await asyncio.to_thread(self._persist, loaded.text)

    def check(self, path: Path) -> Policy:
        """Return a policy file as this device would compile it. Raises PolicyError."""
        return self._read(path).policy

    async def follow(self, path: Path) -> None:
        """Activate another policy file, and watch it. A PolicyError leaves the active policy and its file."""
        loaded = await asyncio.to_thread(self._read, path)
        self.path = path
        self._file_version = await asyncio.to_thread(file_version, path)
        self._activate(loaded)
        await asyncio.to_thread(self._persist, loaded.text)

    async def poll(self) -> None:
        """Reload if the file has changed since it was last read."""
        if await asyncio.to_thread(file_version, self.path) != self._file_version:
            await self.reload()

    def _read(self, path: Path) -> _Loaded:
        """Read and parse a policy. Raises PolicyError, also if the file is missing."""
        if path == self.path:
            self._file_version = file_version(path)  # before reading, so that the next poll sees a change in between
        try:
            with path.open("rb") as file:
                text = file.read(_MAX_BYTES).decode()
        except OSError as error:
            raise PolicyError(error.strerror or "unreadable", where=str(path)) from error
        except UnicodeDecodeError as error:
            raise PolicyError("The file is not UTF-8.", where=str(path)) from error
        policy = with_clouds(parse_policy(text, str(path), self.model_temperature), self.clouds)
        return _Loaded(text, with_adapters(policy, self.model_adapters, self.model_temperature))

    def _read_last_good(self) -> _Loaded | None:
        if self._last_good is None:
            return None
        try:
            return self._read(self._last_good)
        except PolicyError:
            return None

    def _activate(self, loaded: _Loaded, *, refused: str = "") -> None:
        now = self.clock.unix()
        changed = self._active is None or self._active.revision != loaded.policy.revision
        self._active, self.text = loaded.policy, loaded.text
        self.on_activate(loaded.policy)
        self._report = PolicyReport(
            file=str(self.path),
            name=loaded.policy.name,
            revision=loaded.policy.revision,
            activated=now,
            last_good=bool(refused),
            refused=refused,
            refused_at=now if refused else None,
        )
        if not refused:
            self.on_load(True)
        if changed:
            log.info("Policy %s@%s is active.", loaded.policy.name, loaded.policy.revision)

    def _reject(self, error: PolicyError) -> None:
        self.on_load(False)
        log.error("A policy was rejected, and revision %s stays active: %s", error.message, self.active.revision)
        self._report = msgspec.structs.replace(self.report, refused=error.message, refused_at=self.clock.unix())

    def _persist(self, text: str) -> None:
        """Copy the policy by rename, so that a restart never reads half a policy. A failure changes only the report."""
        if self._last_good is None:
            return
        try:
            write_atomically(self._last_good, text.encode(), 0o600)
        except OSError as error:
            self._report = msgspec.structs.replace(self.report, persist_error=error.strerror or "unwritable")
            log.error("%s", self.persist_problem)
