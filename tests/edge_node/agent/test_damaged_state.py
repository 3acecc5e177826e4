"""Files of the agent with a byte that is not UTF-8 in a string: damaged, like any other that cannot be read."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from causeway_server.edge_node.agent.journal import JOURNAL, boot
from causeway_server.edge_node.agent.link.connection import LINK_FILE, read_record
from causeway_server.edge_node.agent.link.identity import IDENTITY, read_identity
from causeway_server.edge_node.agent.link.telemetry import TELEMETRY_FILE, TelemetryLog
from causeway_server.edge_node.agent.store import POINTER, BundleStore, Disk
from causeway_server.edge_node.clock import Clock
from causeway_server.edge_node.observability.metrics import Traffic
from causeway_server.router.errors import ConfigError


def test_each_file_counts_as_damaged(tmp_path: Path) -> None:
    (tmp_path / POINTER).write_bytes(b'{"bundles": ["\xff"]}')
    (tmp_path / LINK_FILE).write_bytes(b'{"boot": "\xff"}')
    (tmp_path / TELEMETRY_FILE).write_bytes(b'[{"device": "\xff"}]')
    (tmp_path / IDENTITY).write_bytes(b'{"device": "\xff"}')
    assert BundleStore(tmp_path, Disk(), "1.0.0").pointer() is None
    assert read_record(tmp_path) is None
    assert TelemetryLog("device", "boot", Traffic, Clock(), tmp_path).next() is None
    with pytest.raises(ConfigError, match="The identity is damaged"):
        read_identity(tmp_path)


def test_a_device_boots_from_the_last_row_of_its_journal_that_can_be_read(tmp_path: Path) -> None:
    """Rows of a newer version, and those with strange bytes, are passed over."""
    for body in (b'{"reason": "\xff"}', b'{"state": "of a newer version"}', b'{"boots": "many"}'):
        digest = hashlib.sha256(body).hexdigest()[:16].encode()
        with (tmp_path / JOURNAL).open("ab") as file:
            file.write(digest + b" " + body + b"\n")
    assert boot(tmp_path, "1.0.0", 0.0).bundle is None
