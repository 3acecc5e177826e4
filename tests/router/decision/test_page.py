"""router/README.md: its table of attempt states is the one in the code."""

from __future__ import annotations

import re
from pathlib import Path

from causeway_server.router.decision.attempts import TABLE, AttemptEvent, AttemptState

PAGE = Path(__file__).parents[3] / "router" / "README.md"


def test_the_page_draws_the_attempt_table() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("| state | "))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:] if line.startswith("|")]
    events, drawn = [AttemptEvent(cell) for cell in rows[0][1:]], {}
    for state, *cells in rows[2 : 2 + sum(map(bool, TABLE.values()))]:
        following = zip(events, cells, strict=True)
        drawn[AttemptState(state)] = {event: AttemptState(cell) for event, cell in following if cell}
    assert drawn == {state: dict(row) for state, row in TABLE.items() if row}
    final = next(line for line in lines if line.endswith("are final."))
    assert set(re.findall(r"`(\w+)`", final)) == {state.value for state, row in TABLE.items() if not row}
