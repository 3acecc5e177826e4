"""Late against early fusion on drawn instrument panels, which training has not seen. All of it is synthetic.

The same question about the same panel, four ways: its readings typed as text (what the model can do at best), the
picture as text facts (late), as soft tokens (early), and no picture at all.
"""

from __future__ import annotations

import random
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from models.train.panels.drawing import CELLS, Panel, as_png, caption, panels
from router.types import Fusion
from tests.modalities.test_fusion import picture, text

from .box import Bench, Reply, benched

_SEED = 70_000  # far from any seed of training
_NUMBER = re.compile(r"\d+")
_ANSWER = 12  # tokens: "The value of left is 45."


async def run(model: str, folders: Sequence[Path], rounds: int) -> bool:
    """Ask about `rounds` panels, and print the shares of right answers. Returns whether early beat late on dials."""
    drawn = panels(rounds, _SEED)
    chosen = random.Random(_SEED)
    asked = [chosen.randrange(len(CELLS)) for _ in drawn]
    right: dict[str, dict[str, list[bool]]] = {}
    ways: dict[str, Fusion] = {"typed": "late", "none": "late", "late": "late", "early": "early"}
    for way, fusion in ways.items():
        async with benched(model, folders, fusion=fusion) as bench:
            await bench.ask(text("hello"), max_tokens=1)  # the language model is loaded
            replies = [await _ask(bench, way, panel, cell) for panel, cell in zip(drawn, asked, strict=True)]
        found = right.setdefault(way, {"dial": [], "display": []})
        for panel, cell, reply in zip(drawn, asked, replies, strict=True):
            instrument = panel.instruments[cell]
            number = _NUMBER.search(reply.text)
            found[instrument.kind].append(number is not None and int(number[0]) == instrument.value)
        print(_line(way, found, replies))
    return _share(right["early"]["dial"]) > _share(right["late"]["dial"])


async def _ask(bench: Bench, way: str, panel: Panel, cell: int) -> Reply:
    question = text(f"What is the value of {CELLS[cell]}?")
    if way == "none":
        return await bench.ask(question, max_tokens=_ANSWER)
    seen = picture(as_png(panel))
    if way == "typed":
        seen = text(f"[A picture:{caption([one.digits for one in panel.instruments])}]")
    return await bench.ask(seen, question, max_tokens=_ANSWER)


def _share(right: Sequence[bool]) -> float:
    return sum(right) / max(1, len(right))


def _line(way: str, found: dict[str, list[bool]], replies: Sequence[Reply]) -> str:
    shares = ", ".join(f"{kind} {100 * _share(right):.0f} % of {len(right)}" for kind, right in found.items())
    branch_s, model_s = (
        statistics.median(values) for values in zip(*((r.slowest_s, r.model_s) for r in replies), strict=True)
    )
    return f"{way}: {shares}; picture {branch_s:.2f} s, model {model_s:.2f} s (medians)"
