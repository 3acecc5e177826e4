"""The table of a job's life (`router.jobs.states`) as Lua: the scripts use that very table."""

from __future__ import annotations

from router.jobs.states import TRANSITIONS


def transitions_as_lua() -> str:
    """Return the table as Lua: `TRANSITIONS[state][event]` is the next state or nil."""
    rows = [
        f"{state.value}={{{','.join(f'{event.value}={to.value!r}' for event, to in row.items())}}}"
        for state, row in TRANSITIONS.items()
    ]
    return f"local TRANSITIONS = {{{','.join(rows)}}}\n"
