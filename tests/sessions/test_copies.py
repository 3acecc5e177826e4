"""What daemon and gateway have each, because neither imports the other, stays the same."""

from __future__ import annotations

import pytest

from tests.check.sources import ROOT


@pytest.mark.parametrize("name", ["live.py", "socket.py"])
def test_what_both_have_is_the_same(name: str) -> None:
    edge, gateway = (ROOT / room / "sessions" / name for room in ("edge_node", "cloud_pool"))
    assert edge.read_text(encoding="utf-8") == gateway.read_text(encoding="utf-8")
