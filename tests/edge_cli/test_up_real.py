"""`causeway-edge up --once` with the real Triton, gateway, engine and models."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from edge_node.cli.up.tour import TOUR

ROOT = Path(__file__).parents[2]
TRITON = Path(os.environ.get("CAUSEWAY_TRITON_ENV", ROOT / ".venv-triton")) / "triton.json"


def orphans() -> set[str]:
    """Return the shared memory of Tritons whose launcher has ended."""
    names = {path.name for path in Path("/dev/shm").glob("triton_python_backend_shm_region_causeway*")}
    owners = {name: re.search(r"causeway(\d+)_", name) for name in names}
    return {name for name, owner in owners.items() if owner is None or not psutil.pid_exists(int(owner[1]))}


def up(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "edge_node", "up", "--once", "--port", "0", "--run-dir", str(folder), *flags],
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        timeout=300,
        check=False,
    )


def routes(printed: str) -> list[str]:
    """Return the route of each question's row, in order."""
    starts = [question.text[:20] for question in TOUR]
    rows = [line for line in printed.splitlines() if any(line.startswith(start) for start in starts)]
    return [line[34:].split()[0] for line in rows]


def test_a_bad_policy_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("version: 1\nname: kiosk\ntarget: {}\n")
    process = up(tmp_path / "runs", "--policy", str(tmp_path / "policy.yaml"))
    assert process.returncode == 2
    assert "policy.yaml:3:1" in process.stdout
    assert "did you mean `targets`?" in process.stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.triton
@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.skipif(not TRITON.exists(), reason="no Triton environment; `make setup` makes it")
def test_the_questions_take_every_route(tmp_path: Path) -> None:
    """Afterwards only logs and state are left: no shared memory, no secret."""
    before = orphans()
    process = up(tmp_path)
    assert process.returncode == 0, process.stdout
    assert routes(process.stdout) == ["edge", "cloud", "cache", "cloud", "edge"], process.stdout
    assert "handoff: low_confidence" in process.stdout
    (folder,) = tmp_path.iterdir()
    assert {path.name for path in folder.iterdir()} == {"triton.log", "gateway.log", "edge.log", "state"}
    assert orphans() <= before


@pytest.mark.engine
@pytest.mark.slow
def test_without_a_cloud_the_device_answers_every_question(tmp_path: Path) -> None:
    process = up(tmp_path, "--no-cloud")
    assert process.returncode == 0, process.stdout
    # The third question repeats the second, whose answer is not degraded and therefore cached.
    assert routes(process.stdout) == ["edge", "edge", "cache", "edge", "edge"]
