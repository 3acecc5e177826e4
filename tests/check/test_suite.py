"""How `python -m tests` runs folders: several at a time, whole outputs, one exit status, and an end on a signal."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.__main__ import TESTS, folders_with_tests

from .sources import ROOT

pytestmark = pytest.mark.slow
PASS = "def test_passes():\n    pass\n"
MEET = """
import time
from pathlib import Path
def test_both_run_at_once():
    Path(__file__).with_name("here").touch()
    while not Path(__file__).parents[1].joinpath({other!r}, "here").exists():
        time.sleep(0.01)
"""
SERVE = """
import time
from pathlib import Path
import pytest
@pytest.fixture(scope="session")
def server():
    yield
    Path(__file__).with_name("stopped").touch()
def test_waits(server):
    Path(__file__).with_name("waits").touch()
    time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:schemathesis -p no:cacheprovider\ntimeout = 60\n")
    return tmp_path


def write(folder: Path, name: str, code: str) -> str:
    (folder / name).mkdir()
    (folder / name / f"test_{name}.py").write_text(code)
    return str(folder / name)


def start(folder: Path, workers: int, *folders: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests", "--workers", str(workers), "--logs", str(folder / "logs"), *folders]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_two_folders_run_at_once(folder: Path) -> None:
    suite = start(folder, 2, *(write(folder, name, MEET.format(other=other)) for name, other in ("ab", "ba")))
    printed = suite.communicate(timeout=100)[0]
    assert suite.returncode == 0, printed
    assert "2 passed in" in printed.splitlines()[-1]


def test_a_failure_is_shown_whole_and_again_at_the_end(folder: Path) -> None:
    """So is a pytest that dies. The folders after it run."""
    codes = {
        "fails": "def test_fails():\n    assert 'left' == 'right'\n",
        "dies": "import os\ndef test_dies():\n    os._exit(7)\n",
        "passes": PASS + "import pytest\n@pytest.mark.skip\ndef test_skipped():\n    pass\n",
    }
    suite = start(folder, 1, *(write(folder, name, code) for name, code in codes.items()))
    lines = suite.communicate(timeout=100)[0].splitlines()
    assert suite.returncode == 1
    begins = [number for number, line in enumerate(lines) if line.endswith(" begins")]
    assert len(begins) == 3
    assert "E       AssertionError: assert 'left' == 'right'" in lines[begins[0] : begins[1]]
    failed, died, counts = lines[-3:]
    assert failed.startswith("FAILED ")
    assert "test_fails" in failed
    assert died.endswith("dies: pytest ended with status 7")
    assert counts.startswith("1 failed, 1 passed, 1 skipped in ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_servers_of_the_running_folders(folder: Path, number: signal.Signals) -> None:
    """Nothing begins after it."""
    suite = start(folder, 1, write(folder, "serves", SERVE), write(folder, "later", PASS))
    assert suite.stdout is not None
    while not (folder / "serves" / "waits").exists():
        assert suite.poll() is None, suite.stdout.read()
    suite.send_signal(number)
    printed = suite.communicate(timeout=100)[0]
    assert suite.returncode == 128 + number, printed
    assert (folder / "serves" / "stopped").exists()
    assert "later begins" not in printed


def test_a_single_pytest_that_is_terminated_stops_its_servers(folder: Path) -> None:
    """As by `timeout`: with what tests/conftest.py sets."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", write(folder, "serves", SERVE)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    while not (folder / "serves" / "waits").exists():
        assert process.poll() is None, process.stdout.read()
    process.terminate()
    printed = process.communicate(timeout=100)[0]
    assert (folder / "serves" / "stopped").exists(), printed


def test_every_module_of_tests_is_in_a_folder_that_runs() -> None:
    found = [TESTS / name for names in folders_with_tests() for name in names.split()]
    assert {path for folder in found for path in folder.rglob("test_*.py")} == set(TESTS.rglob("test_*.py"))
    assert all(any(folder.rglob("test_*.py")) for folder in found)
    assert len(found) == len(set(found))
