"""`causeway-edge up --once` as a user runs it: the real Triton, gateway, engine and models."""

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
    """Shared memory of a Triton whose launcher is gone."""
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
    """The route of each question's row, in order."""
    starts = [question.text[:20] for question in TOUR]
    rows = [line for line in printed.splitlines() if any(line.startswith(start) for start in starts)]
    return [line[34:].split()[0] for line in rows]


@pytest.mark.triton
@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.skipif(not TRITON.exists(), reason="no Triton environment; `make setup` makes it")
def test_the_tour_goes_every_way(tmp_path: Path) -> None:
    """Device, cloud, cache, handoff, private; then only logs and state are left: no shared memory, no secret."""
    before = orphans()
    done = up(tmp_path)
    assert done.returncode == 0, done.stdout
    assert routes(done.stdout) == ["edge", "cloud", "cache", "cloud", "edge"], done.stdout
    assert "handoff: low_confidence" in done.stdout
    (folder,) = tmp_path.iterdir()
    assert {path.name for path in folder.iterdir()} == {"triton.log", "gateway.log", "edge.log", "state"}
    assert orphans() <= before


@pytest.mark.engine
@pytest.mark.slow
def test_the_edge_alone_answers_everything_itself(tmp_path: Path) -> None:
    """Without a cloud every question is answered on the device."""
    done = up(tmp_path, "--no-cloud")
    assert done.returncode == 0, done.stdout
    assert routes(done.stdout) == ["edge"] * 5
