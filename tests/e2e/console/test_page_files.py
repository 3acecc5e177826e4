"""The files of both consoles."""

from __future__ import annotations

import re

import pytest

from causeway_server.router.serving.console import SHARED
from tests.check.sources import ROOT

DEVICE, FLEET = ROOT / "edge_node" / "console" / "page", ROOT / "fleet" / "console" / "page"
FILES = sorted([*DEVICE.iterdir(), *FLEET.iterdir(), *SHARED.iterdir()])


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parts[-4]}/{path.name}")
def test_no_file_needs_another_server_or_an_exception_from_the_policy(path: object) -> None:
    """No address but SVG's name space, no inline style or script, no markup made from text."""
    text = path.read_text(encoding="utf-8")  # type: ignore[attr-defined]
    assert set(re.findall(r"https?://[^\s\"')]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|cssText", text) == []
    if path.name.endswith(".html"):  # type: ignore[attr-defined]
        assert re.findall(r"<script(?![^>]*\ssrc=)|\son\w+=|\sstyle=|<style", text) == []
