"""The systemd unit: what it starts exists, and its settings fit what the daemon does."""

from __future__ import annotations

import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest
from click.testing import CliRunner

from causeway_server.edge_node.cli.main import main
from causeway_server.edge_node.config.schema import ServerConfig

from .sources import ROOT

UNIT = ROOT / "edge_node" / "deploy" / "causeway-edge.service"


def settings() -> dict[str, list[str]]:
    """Key → values, in order; a unit may say a key more than once."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in UNIT.read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found[key].append(value)
    return found


def test_the_unit_starts_a_command_that_there_is() -> None:
    """ExecStart names our console command, a sub-command of it, and options that it has."""
    (start,) = settings()["ExecStart"]
    program, command, *words = start.split()
    assert Path(program).name == "causeway-edge"
    usage = CliRunner().invoke(main, [command, "--help"])
    assert usage.exit_code == 0
    assert [word for word in words if word.startswith("--") and word not in usage.output] == []


def test_systemd_waits_longer_than_the_daemon_drains() -> None:
    """A drain that takes its full time ends before systemd would kill the daemon."""
    (stop,) = settings()["TimeoutStopSec"]
    assert float(stop) > ServerConfig().drain_s


def test_the_unit_watches_and_outlives_its_engine() -> None:
    """Readiness and the watchdog are on, and an engine that the kernel kills does not stop the daemon."""
    found = settings()
    assert found["Type"] == ["notify"]
    assert float(found["WatchdogSec"][0]) > 0
    assert found["OOMPolicy"] == ["continue"]
    assert found["KillMode"] == ["mixed"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """systemd knows every section and key; the program is replaced by one that this machine has."""
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/causeway/.venv/bin/causeway-edge", "/bin/true"))
    checked = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, check=False)
    assert [line for line in checked.stderr.splitlines() if UNIT.name in line] == []
    assert checked.returncode == 0
