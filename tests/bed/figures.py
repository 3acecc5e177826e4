"""Quantiles, text tables, and the line of figures that `tests.bench ablation` reads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

FIGURES = "figures: "


def print_figures(values: Mapping[str, float]) -> None:
    """Print what a run found, for programs."""
    print(FIGURES + json.dumps({name: round(value, 4) for name, value in values.items()}))


def quantile(values: Iterable[float], share: float) -> float:
    """Return the value that `share` of them do not exceed; 0 for no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    cells = [[_text(cell) for cell in row] for row in (heads, *rows)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(heads))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join(lines)


def _text(cell: object) -> str:
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell)
