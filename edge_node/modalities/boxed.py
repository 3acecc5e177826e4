"""The program that speaks, and the message of a box that has no speech encoder."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Mapping

from models.modalities.installed import SPEECH_MODEL

NO_SPEECH = (
    "this box has nothing that understands speech: `pip install 'causeway[voice]'`, then `causeway-models pull "
    f"{SPEECH_MODEL}`, then restart the daemon."
)
PROGRAM = "espeak-ng"
"""It speaks; a package of the distribution."""


def find_program(environ: Mapping[str, str]) -> str | None:
    """Return the path of the program that speaks; None where it is not installed."""
    return shutil.which(PROGRAM, path=environ.get("PATH", ""))


def is_onnxruntime_installed() -> bool:
    """Whether the package that runs added voices is there; imports nothing of it."""
    return importlib.util.find_spec("onnxruntime") is not None
