"""`causeway-edge up --once` with the real Triton, gateway, engine and models."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from causeway_server.edge_node.cli.up.models import TOUR

ROOT = Path(__file__).parents[3]
TRITON = Path(os.environ.get("CAUSEWAY_TRITON_ENV", ROOT / ".venv-triton")) / "triton.json"
SHARED_MEMORY = Path("/dev/shm")


class Run:
    """`up --once`, run to its end. `shared_memory`: what its Triton had, as seen at each line that was printed."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.shared_memory: set[Path] = set()
        self.stdout = ""
        with subprocess.Popen(
            [
                sys.executable,
                "-m",
                "causeway_server.edge_node",
                "up",
                "--once",
                "--port",
                "0",
                "--run-dir",
                str(folder),
                *flags,
            ],
            env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                self.stdout += line
                with suppress(psutil.NoSuchProcess):
                    for child in psutil.Process(process.pid).children():
                        self.shared_memory |= set(SHARED_MEMORY.glob(f"*_region_causeway{child.pid}_*"))
        self.returncode = process.returncode


def routes(printed: str) -> list[str]:
    """Return the route of each question's row, in order."""
    starts = [question.text[:20] for question in TOUR]
    rows = [line for line in printed.splitlines() if any(line.startswith(start) for start in starts)]
    return [line[34:].split()[0] for line in rows]


@pytest.mark.slow
def test_a_bad_policy_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("version: 1\nname: kiosk\ntarget: {}\n")
    process = Run(tmp_path / "runs", "--policy", str(tmp_path / "policy.yaml"))
    assert process.returncode == 2
    assert "policy.yaml:3:1" in process.stdout
    assert "did you mean `targets`?" in process.stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.triton
@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.skipif(not TRITON.exists(), reason="no Triton environment; `make setup` makes it")
def test_the_questions_take_every_route(tmp_path: Path) -> None:
    """Afterwards only logs, the gateway's tiers, state and its key are left: no shared memory, no other secret."""
    process = Run(tmp_path)
    assert process.returncode == 0, process.stdout
    assert routes(process.stdout) == ["edge", "cloud", "cache", "cloud", "edge"], process.stdout
    assert "handoff: low_confidence" in process.stdout
    (folder,) = tmp_path.iterdir()
    left = {"triton.log", "gateway.log", "gateway.yaml", "edge.log", "state", "state.key"}
    assert {path.name for path in folder.iterdir()} == left
    assert process.shared_memory
    assert not [region for region in process.shared_memory if region.exists()]


@pytest.mark.engine
@pytest.mark.slow
def test_without_a_cloud_the_device_answers_every_question(tmp_path: Path) -> None:
    process = Run(tmp_path, "--no-cloud")
    assert process.returncode == 0, process.stdout
    # The third question repeats the second, whose answer is not degraded and therefore cached.
    assert routes(process.stdout) == ["edge", "edge", "cache", "edge", "edge"]
