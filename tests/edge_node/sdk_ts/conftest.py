"""Node.js and the SDK that set-up has compiled."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.prepare.programs import NODE

SDK = Path(__file__).parents[3] / "edge_node" / "sdk-ts"
HERE = Path(__file__).parent


@pytest.fixture
def node() -> str:
    """The program; without it, or without the compiled SDK, the test is skipped."""
    program = NODE.find()
    if program is None or not (SDK / "dist" / "index.js").exists():
        pytest.skip("no Node.js, or no compiled SDK, here")
    return program
