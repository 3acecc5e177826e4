"""Late against early fusion on drawn instrument panels, which training has not seen. All of it is synthetic.

The same question about the same panel, four ways: its readings typed as text (what the model can do at best), the
picture as text facts (late), as soft tokens (early), and no picture at all.
"""

from __future__ import annotations

import io
import random
import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime

from models.catalog.projector import find_projector
from models.train.panels.drawing import CELLS, Panel, as_input, caption, draw_panel, panels
from router.types import Fusion
from tests.modalities.test_fusion import picture, text

from .box import Bench, Reply, benched

_SEED = 70_000  # far from any seed of training
_NUMBER = re.compile(r"\d+")
_BATCH = 8  # pictures
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


def batched(model: str, folders: Sequence[Path], rounds: int) -> bool:
    """Print how many pictures a second are encoded and projected one by one, and eight in a run. Interleaved."""
    projector = find_projector(model, folders)
    assert projector is not None, f"{model} has no projector"
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2  # as the box's process has
    sessions = [onnxruntime.InferenceSession(path, options) for path in (projector.encoder, projector.path)]
    side = int(sessions[0].get_inputs()[0].shape[1])
    pixels = np.stack([as_input(panel, side) for panel in panels(_BATCH, _SEED)])
    rates: dict[int, list[float]] = {1: [], _BATCH: []}
    for _ in range(rounds):
        for size, found in rates.items():
            started = time.perf_counter()
            for first in range(0, _BATCH, size):
                (features,) = sessions[0].run(["features"], {"pixels": pixels[first : first + size]})
                sessions[1].run(["embeddings"], {"features": features})
            found.append(_BATCH / (time.perf_counter() - started))
    for size, found in rates.items():
        print(f"{size} in a run: {statistics.median(found):.0f} pictures/s in the median, {max(found):.0f} at best")
    return True


async def _ask(bench: Bench, way: str, panel: Panel, cell: int) -> Reply:
    question = text(f"What is the value of {CELLS[cell]}?")
    if way == "none":
        return await bench.ask(question, max_tokens=_ANSWER)
    seen = picture(_as_png(panel))
    if way == "typed":
        seen = text(f"[A picture:{caption([one.digits for one in panel.instruments])}]")
    return await bench.ask(seen, question, max_tokens=_ANSWER)


def _as_png(panel: Panel) -> bytes:
    file = io.BytesIO()
    draw_panel(panel).save(file, "PNG")
    return file.getvalue()


def _share(right: Sequence[bool]) -> float:
    return sum(right) / max(1, len(right))


def _line(way: str, found: dict[str, list[bool]], replies: Sequence[Reply]) -> str:
    shares = ", ".join(f"{kind} {100 * _share(right):.0f} % of {len(right)}" for kind, right in found.items())
    branch_s, model_s = (
        statistics.median(values) for values in zip(*((r.slowest_s, r.model_s) for r in replies), strict=True)
    )
    return f"{way}: {shares}; picture {branch_s:.2f} s, model {model_s:.2f} s (medians)"
