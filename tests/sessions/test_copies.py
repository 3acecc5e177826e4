"""What daemon and gateway have each, because neither imports the other, stays the same."""

from __future__ import annotations

from tests.check.sources import ROOT


def test_the_sockets_are_the_same() -> None:
    edge, gateway = (ROOT / room / "sessions" / "socket.py" for room in ("edge_node", "cloud_pool"))
    assert edge.read_text(encoding="utf-8") == gateway.read_text(encoding="utf-8")
