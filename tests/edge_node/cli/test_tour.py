"""The table of the demo questions fits the terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from causeway_sdk import Decision
from causeway_server.edge_node.cli.up.models import TOUR, Row, render_table

ROWS = [
    Row(TOUR[0], Decision(route="edge", target="small", reason="fast-path", first_token_ms=12.34), "{}", 45.6),
    Row(TOUR[1], Decision(route="cloud", target="large", reason="otherwise", degraded=True), "an answer", 1234.5),
    Row(TOUR[3], Decision(), error="503 no_route: nothing left"),
]


@pytest.mark.parametrize("width", [80, 100, 140, 300])
def test_every_width_shows_whole_routes_targets_reasons_and_times(width: int) -> None:
    """Only questions and answers are truncated."""
    console = Console(width=width, file=io.StringIO())
    console.print(render_table(ROWS, width))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    for text in ("edge", "small", "fast-path", "12.3", "45.6", "cloud (degraded)", "large", "otherwise", "1234.5", "–"):
        assert text in printed
    assert ("an answer" in printed) == (width >= 100)
    assert all(len(line) <= width for line in printed.splitlines())


def test_the_questions_cover_every_route() -> None:
    """One question is repeated for the cache, and one is private."""
    assert len({question.text for question in TOUR}) == len(TOUR) - 1
    assert [question.tags for question in TOUR].count(("private",)) == 1
