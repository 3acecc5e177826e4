"""`causeway-edge fleet`: what needs no other process."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from causeway_server.edge_node.agent.journal import JOURNAL, Journal, JournalRow, quarantine
from causeway_server.edge_node.agent.link.connection import LINK_FILE, AgentReport, LinkRecord
from causeway_server.edge_node.agent.link.identity import IDENTITY, Identity, write_identity, write_synced
from causeway_server.edge_node.agent.store import Disk
from causeway_server.edge_node.cli.main import main
from tests.terminal import at_terminal

BUNDLE = "d" * 64


def run(*arguments: str, **more: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["fleet", *arguments], **more)  # type: ignore[arg-type]
    return done.exit_code, done.output


def in_a_fleet(state_dir: Path) -> Path:
    folder = state_dir / "fleet"
    folder.mkdir()
    identity = Identity(
        device="kiosk-1", tenant="acme", cohort="kiosk", fleet="stores", url="https://f.example", root="{}", joined=1.0
    )
    write_identity(folder, identity)
    return folder


def test_the_commands_are_there() -> None:
    code, output = run("--help")
    assert code == 0
    for command in ("join", "leave", "status", "import"):
        assert f"  {command}  " in output


def test_status_of_a_device_that_is_in_no_fleet(tmp_path: Path) -> None:
    assert run("status", "--state-dir", str(tmp_path)) == (
        1,
        "This device is not in a fleet: causeway-edge fleet join\n",
    )
    code, output = run("status", "--format", "json", "--state-dir", str(tmp_path))
    assert (code, json.loads(output)) == (1, {"joined": False})


def test_status_says_what_the_daemon_wrote(tmp_path: Path) -> None:
    folder = in_a_fleet(tmp_path)
    code, output = run("status", "--state-dir", str(tmp_path))
    assert (code, "restart it" in output) == (0, True)
    report = AgentReport(running=BUNDLE, code="errors_rose", reason="5 %", quarantined=("e" * 64,))
    record = LinkRecord(
        boot="b", last_seen=5.0, problems=("Two devices report as kiosk-1",), cloned=True, report=report
    )
    write_synced(folder / LINK_FILE, json.dumps({"boot": "old"}).encode())
    write_synced(folder / LINK_FILE, msgspec.json.encode(record))
    code, output = run("status", "--state-dir", str(tmp_path))
    assert code == 1
    for word in ("kiosk-1", "stores", BUNDLE, "errors_rose", "e" * 64, "Two devices report"):
        assert word in output
    refused = quarantine({}, "e" * 64, "errors_rose: 8 of 8 requests failed")
    Journal(folder / JOURNAL, Disk()).append(JournalRow(quarantined=refused))
    _, output = run("status", "--state-dir", str(tmp_path))
    assert f"bundle {'e' * 64} is not tried again: errors_rose: 8 of 8 requests failed" in output
    code, output = run("status", "--format", "json", "--state-dir", str(tmp_path))
    document = json.loads(output)
    assert (document["device"], document["link"]["cloned"]) == ("kiosk-1", True)
    assert "root" not in document


def test_leaving_names_the_device_to_revoke(tmp_path: Path) -> None:
    in_a_fleet(tmp_path)
    code, output = run("leave", "--yes", "--state-dir", str(tmp_path))
    assert (code, output) == (
        0,
        "Left the fleet. An operator must revoke the device at the control plane: causeway-fleet revoke kiosk-1\n",
    )


def test_leaving_asks_and_never_without_a_terminal(tmp_path: Path) -> None:
    folder = in_a_fleet(tmp_path)
    code, output = run("leave", "--state-dir", str(tmp_path), input="y\n")
    assert (code, "there is no terminal to ask at; --yes answers" in output, folder.exists()) == (2, True, True)
    command = [sys.executable, "-m", "causeway_server.edge_node", "fleet", "leave", "--state-dir", str(tmp_path)]
    for keys in ("n\n", "\x04"):
        code, output = at_terminal(command, keys, os.environ)
        assert (code, "Nothing was changed" in output, folder.exists()) == (1, True, True)
    code, output = at_terminal(command, "y\n", os.environ)
    assert (code, "Remove the identity, the key and the bundles of kiosk-1?" in output) == (0, True)
    assert not folder.exists()
    assert run("leave", "--state-dir", str(tmp_path)) == (
        0,
        "This device is not in a fleet, so there is nothing to leave.\n",
    )


def test_a_damaged_identity_is_a_usage_error_and_can_be_left(tmp_path: Path) -> None:
    folder = in_a_fleet(tmp_path)
    (folder / IDENTITY).write_text("{")
    code, output = run("status", "--state-dir", str(tmp_path))
    assert (code, "damaged" in output) == (2, True)
    assert run("leave", "--yes", "--state-dir", str(tmp_path))[0] == 0
    assert not folder.exists()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("http://fleet.example", "--token", "t"), "https"),
        (("https://fleet.example", "--token", "t", "--label", "role"), "KEY=VALUE"),
        (("https://fleet.example", "--token", " "), "The join token is empty"),
        (("https://fleet.example", "--token", "t", "--ca-file", "none.pem"), "none.pem"),
    ],
)
def test_what_join_refuses_at_once(tmp_path: Path, arguments: tuple[str, ...], word: str) -> None:
    code, output = run("join", *arguments, "--state-dir", str(tmp_path))
    assert (code, word in output) == (2, True), output
    assert not (tmp_path / "fleet" / IDENTITY).exists()


def test_import_needs_an_identity(tmp_path: Path) -> None:
    code, output = run("import", str(tmp_path), "--state-dir", str(tmp_path))
    assert (code, "not in a fleet" in output) == (2, True)
