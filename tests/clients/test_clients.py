"""The official clients of npm, unmodified: all flows, at the edge and at a gateway."""

from __future__ import annotations

import pytest

from tests.node import run_node_tests
from tests.waiting import until

from .conftest import HERE, KEY, Place

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("file", "least"), [("anthropic", 11), ("openai", 12), ("ai_sdk", 26)])
async def test_each_flow_is_green(node: str, place: Place, file: str, least: int) -> None:
    """The scripted model was given no history that a strict vendor would refuse, and nothing is left running."""
    key = {"CAUSEWAY_API_KEY": KEY} if place.name == "gateway" else {}
    environ = {"CAUSEWAY_URL": place.url, "CAUSEWAY_MODEL": place.model, "CAUSEWAY_PLACE": place.name, **key}
    assert await run_node_tests(node, HERE / f"{file}.test.mjs", environ) >= least
    assert place.played.faults == []
    await until(lambda: place.played.running == 0)
