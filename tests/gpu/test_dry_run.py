"""The stages of a day with a GPU, on the CPU with the shipped model: each leaves its figures or says that it failed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("llama_cpp")

from tests.check.sources import ROOT

from .stages import Heat, Streams

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def run(folder: Path, *model: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "DRY_RUN": "1", "PYTHON": sys.executable}
    command = [ROOT / "tests" / "gpu" / "run.sh", folder, *model]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)


def test_each_stage_leaves_its_figures(tmp_path: Path) -> None:
    result = run(tmp_path)
    assert result.returncode == 0, result.stdout
    for name, count in (("one-stream", 1), ("four-streams", 4)):
        found = msgspec.json.decode((tmp_path / f"{name}.json").read_bytes(), type=Streams)
        assert (found.streams, len(found.ours), len(found.raw)) == (count, 1, 1)
        assert min(found.ours + found.raw) > 0
    assert msgspec.json.decode((tmp_path / "heat.json").read_bytes(), type=Heat).busy_s > 0
    findings = msgspec.json.decode((tmp_path / "doctor.json").read_bytes())["findings"]
    assert {"gpu", "onnx"} <= {finding["check"] for finding in findings}


def test_a_stage_that_fails_says_so_and_the_others_run(tmp_path: Path) -> None:
    result = run(tmp_path, tmp_path / "missing.gguf")
    assert result.returncode == 1
    assert "done    doctor" in result.stdout
    assert "failed  one-stream: " in result.stdout
    assert "failed  heat: " in result.stdout
