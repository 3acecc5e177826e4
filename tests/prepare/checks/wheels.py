"""The wheels in `dist/`, and the packages of other projects that they need."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from ..environments import NETWORK_ADVICE
from ..places import Places
from ..progress import StepFailed, run

OURS = ("causeway_router", "causeway_sdk", "llama_cpp_python")
ANSWER = re.compile(r"^wake me up at six am +edge +small ")
"""The line of `causeway-edge up` with an answer of the device."""


def wheels(places: Places, machine: str) -> list[str]:
    """Return what to install: our wheels, the product's with the extras of a device. Raises StepFailed."""
    ends = ("-py3-none-any.whl", "-py3-none-any.whl", f"_{machine}.whl")
    pairs = zip(OURS, ends, strict=True)
    found = [next((places.root / "dist").glob(f"{name}-*{end}"), None) for name, end in pairs]
    if None in found:
        raise StepFailed(
            f"dist/ lacks a wheel for {machine}.", "Build it: make dist, for another machine make dist ARGS=…"
        )
    return [f"{found[0]}[edge,engine,cpu]", *map(str, found[1:])]


def fetch(places: Places, wishes: Sequence[str], hand: Path, more: Sequence[str] = ()) -> Path:
    """Fetch the packages that our wheels need, without ours, into a folder. Returns it.

    `more`: pip's flags for another machine.
    """
    flags: list[str | Path] = ["-q", "--only-binary=:all:", *more, "--find-links", hand, "-d", hand]
    download = [sys.executable, "-m", "pip", "download", *flags, *wishes]
    log = places.logs / "dist-fetch.log"
    try:
        run([*download, "--no-index"], log=log)  # a second time needs no network
    except StepFailed:
        run(download, log=log, advice=NETWORK_ADVICE)
    for name in OURS:
        for path in hand.glob(f"{name}-*"):
            path.unlink()
    return hand
