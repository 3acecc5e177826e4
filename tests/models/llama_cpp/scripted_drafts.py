"""Drafts of a real engine that a test controls, whatever the planner measures.

`install` writes a `sitecustomize.py`, which an engine child imports when `PYTHONPATH` names its folder.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from causeway_server.models.llama_cpp.scheduling.speculation import Draft, Drafting, DraftPlanner

_CUSTOMIZE = """
from pathlib import Path
from causeway_server.models.llama_cpp.scheduling.speculation import DraftPlanner
from tests.models.llama_cpp.scripted_drafts import plan_until_stopped

DraftPlanner.plan = plan_until_stopped(Path({folder!r}))
"""
ENOUGH = 12  # accepted draft tokens until the child stops


def plan_always(planner: DraftPlanner, decoding: Sequence[Drafting], room: int) -> list[Draft]:
    """Draft what the look-up predicts; of every third draft the second token is wrong."""
    drafts: list[Draft] = []
    for index, sequence in enumerate(decoding):
        assert sequence.lookup is not None
        tokens = sequence.lookup.draft(min(4, sequence.remaining - 1, room - 4 * index))
        if len(tokens) > 1 and planner.drafted % 3 == 0:
            tokens[1] = 0
        if tokens:
            drafts.append(Draft(index, tokens))
    return drafts


def install(folder: Path) -> None:
    """Write `sitecustomize.py`: once there is a file `stop`, the engine stops in the next answer that it speculates on.

    It then writes `stopped`, with the tokens that the answer has left, and its thread waits for ever.
    """
    (folder / "sitecustomize.py").write_text(_CUSTOMIZE.format(folder=str(folder)))


def plan_until_stopped(folder: Path) -> Callable[[DraftPlanner, Sequence[Drafting], int], list[Draft]]:
    """Return the plan of `install`."""
    accepted: list[int] = []  # when the file was seen

    def plan(planner: DraftPlanner, decoding: Sequence[Drafting], room: int) -> list[Draft]:
        if (folder / "stop").exists():
            accepted.append(planner.accepted)
            if planner.accepted - accepted[0] >= ENOUGH:
                (folder / "stopped.draft").write_text(str(decoding[0].remaining))
                (folder / "stopped.draft").rename(folder / "stopped")
                threading.Event().wait()
        return plan_always(planner, decoding, room)

    return plan
