"""`link.json`: the state of the box's connection and of its agent, as the daemon wrote it last, for people."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from .identity import write_synced
from .reporter import AgentReport

log = logging.getLogger(__name__)

LINK_FILE = "link.json"


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
