"""What the agent tells: its state, a report to the control plane after each change, and `link.json` for people."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from router.bundle.protocol import BoxState, StatusReport

from ... import daemon_version
from .identity import write_synced

log = logging.getLogger(__name__)

LINK_FILE = "link.json"


class AgentReport(msgspec.Struct, frozen=True, kw_only=True):
    """The agent's part of a `StatusReport`, whose attributes are explained there."""

    state: BoxState = BoxState.IDLE
    running: str | None = None
    wanted: str | None = None
    rollout: str = ""
    code: str = ""
    reason: str = ""
    quarantined: tuple[str, ...] = ()
    unproven: bool = False
    since: float = 0.0


class StatusWriter:
    """Makes reports, each with a higher number."""

    def __init__(self, device: str, boot: str, unix: Callable[[], float]) -> None:
        self._device = device
        self._boot = boot
        self._unix = unix
        self._seq = 0
        self._daemon = daemon_version()

    def report(self, agent: AgentReport) -> StatusReport:
        now = self._unix()
        local = time.localtime(now)
        self._seq += 1
        return StatusReport(
            device=self._device,
            boot=self._boot,
            seq=self._seq,
            sent=now,
            daemon=self._daemon,
            local_weekday=local.tm_wday + 1,
            local_minute=local.tm_hour * 60 + local.tm_min,
            **msgspec.structs.asdict(agent),
        )


class LinkRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `link.json`, for `causeway-edge fleet status`. Times are unix seconds, 0: never."""

    boot: str
    last_seen: float = 0.0
    problems: tuple[str, ...] = ()
    cloned: bool = False
    report: AgentReport = AgentReport()


class LinkRecordFile:
    """Writes the record after a change.

    Args:
        folder: STATE_DIR/fleet.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LINK_FILE
        self._written: LinkRecord | None = None

    def write(self, record: LinkRecord) -> None:
        """Write the record, unless only `last_seen` differs: that alone is not worth a write to flash."""
        written = self._written
        if written is not None and msgspec.structs.replace(record, last_seen=written.last_seen) == written:
            return
        try:
            write_synced(self._path, msgspec.json.encode(record))
        except OSError as error:
            log.warning("%s cannot be written: %s", self._path, error.strerror)
            return
        self._written = record


def read_record(folder: Path) -> LinkRecord | None:
    """Return the record that the daemon wrote last, None if there is none that can be read."""
    try:
        return msgspec.json.decode((folder / LINK_FILE).read_bytes(), type=LinkRecord)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
