"""Lint, format and types: in `make test` they run beside other folders, in `make check` before the tests."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .sources import ROOT

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("check", ["ruff check .", "ruff format --check .", "mypy"])
def test_the_tree_has_no_findings(check: str) -> None:
    done = subprocess.run([sys.executable, "-m", *check.split()], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
