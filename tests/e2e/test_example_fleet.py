"""The example of a fleet of three, as its reader runs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
RUN = Path(__file__).parents[2] / "examples" / "fleet" / "run.sh"


def test_three_devices_join_and_run_the_signed_policy(tmp_path: Path) -> None:
    """Every device of the rollout has the bundle, and answers; nothing is left when the script ends."""
    if shutil.which("jq") is None:
        pytest.skip("no jq here")
    folder = tmp_path / "work"
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    ended = subprocess.run([RUN, folder], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "3 of 3 reachable members have the bundle" in ended.stdout
    assert ended.stdout.count('"name":"alarm_set"') == 3
    left = subprocess.run(["pgrep", "-f", str(folder)], capture_output=True, text=True, check=False)
    assert left.stdout == ""
