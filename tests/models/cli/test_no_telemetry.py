"""ONNX Runtime sends nothing home: its uploader, its device id and its store of events never come to be."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.check.sources import FOLDERS, ROOT, parse, python_files

pytest.importorskip("onnxruntime")

_BRING_ONNX_RUNTIME = {"onnxruntime", "faster_whisper", "rapidocr_onnxruntime"}
_SUPPRESSED_BY = ("ORT_DISABLE_TELEMETRY", "ORT_RUNNING_UNIT_TESTS", "CI", "GITHUB_ACTIONS", "TF_BUILD")
_SESSION = """
from causeway_server.models.signals.onnx_graph import OnnxGraph
from pathlib import Path
OnnxGraph(Path("models/artifacts/encoder/model.onnx"))
"""


@pytest.mark.slow
def test_a_session_leaves_no_device_id_and_no_events(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name not in _SUPPRESSED_BY}
    environ |= {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_DATA_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", _SESSION], cwd=ROOT, env=environ, check=True, timeout=120)
    assert [str(path) for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.slow
@pytest.mark.parametrize("package", [package for package in FOLDERS if package != "models"])
def test_only_models_imports_libraries_that_bring_onnx_runtime(package: str) -> None:
    """`models/__init__.py` is then imported before them, and turns telemetry off."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in python_files(package)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
        if name is not None and name.partition(".")[0] in _BRING_ONNX_RUNTIME
    ]
    assert found == []
