"""`causeway-models` where causeway-train is not installed, as on a device and a gateway."""

from __future__ import annotations

import subprocess
import sys
import sysconfig

import pytest

from tests.check.sources import ROOT

# Python's -S reads no .pth file, by which the checkout's distributions are found.
_PROGRAM = f"""
import sys
sys.path += [{str(ROOT / ".venv" / "checkout")!r}, {sysconfig.get_path("purelib")!r}]
from causeway_server.models.cli.commands import main
main(prog_name="causeway-models")
"""


def causeway_models(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-S", "-c", _PROGRAM, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=60, check=False)


@pytest.mark.parametrize("command", ["calibrate", "candidates"])
def test_a_command_of_training_names_the_distribution_to_install(command: str) -> None:
    result = causeway_models(command, "--help")
    assert result.returncode == 1
    assert result.stderr == "Error: causeway_train is not installed: pip install 'causeway-train'\n"


def test_help_lists_the_commands_that_are_installed() -> None:
    result = causeway_models("--help")
    assert result.returncode == 0, result.stderr
    assert "\n  pull " in result.stdout
    assert "\n  calibrate " not in result.stdout
