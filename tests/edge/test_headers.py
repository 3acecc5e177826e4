"""The tables of headers match the code and the running daemon."""

from __future__ import annotations

import re
from pathlib import Path

from edge_node.http.headers import REQUEST_HEADERS, RESPONSE_HEADERS

from .box import running

ROOMS = [Path(__file__).parents[2] / "edge_node" / room for room in ("http", "jobs")]
SOURCES = [path for room in ROOMS for path in room.glob("*.py") if path.stem != "headers"]


def test_every_causeway_header_in_the_code_has_a_meaning() -> None:
    used = {name for path in SOURCES for name in re.findall(r"\bx-causeway-[a-z-]*[a-z]", path.read_text())}
    assert used == {name for name in (*REQUEST_HEADERS, *RESPONSE_HEADERS) if name.startswith("x-causeway-")}


async def test_every_response_header_of_an_answer_has_a_meaning(tmp_path: Path) -> None:
    async with running(tmp_path) as box:
        sent = {name.lower() for name in (await box.ask()).headers}
    sent.add("x-causeway-modalities")  # only of a request with sound or pictures: tests/modalities
    assert {name for name in sent if name.startswith("x-")} == {name for name in RESPONSE_HEADERS if name[:2] == "x-"}
