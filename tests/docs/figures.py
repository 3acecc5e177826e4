"""The figures in README.md's prose, taken from the kept tables of tests/bench/RESULTS.md."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterator

from .tables import ROOT

RESULTS = ROOT / "tests" / "bench" / "RESULTS.md"
_NUMBER = re.compile(r"-?\d[\d,]*\.?\d*")


def readme_figures(results: str = "") -> str:
    """Return the paragraph. Raises LookupError for a row or a column that `results` lacks.

    Args:
        results: The page of results; by default the one that is kept.
    """
    page = results or RESULTS.read_text(encoding="utf-8")
    decision_us = _figure(page, "", "routing decision, median", "behind it")
    hit_ms = _figure(page, "", "cached answer, 1 connection", "behind it")
    ours_ms, litellm_ms = (
        _figure(page, "Beside other proxies", name, "to the first token") for name in ("our edge", "LiteLLM")
    )
    text = (
        f"A decision takes {decision_us} µs, and an answer from the cache takes {hit_ms} ms. While 32 clients receive "
        f"streams, the daemon delays a first token by {ours_ms} ms, and LiteLLM delays it by {litellm_ms} ms "
        "([figures](tests/bench/RESULTS.md))."
    )
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


def _figure(page: str, section: str, row: str, column: str) -> str:
    """Return the first number in the column of the first row that begins so.

    Args:
        page: The page of results.
        section: A title; "" for the beginning of the page.
        row: How its first cell begins.
        column: A part of the column's head.
    """
    before, _, rest = page.partition(f"\n## {section}\n" if section else "\n## ")
    text = rest.partition("\n## ")[0] if section else before
    lines = list(_cells(text))
    for head, cells in itertools.pairwise(lines):
        if set("".join(cells)) <= {"-"}:
            columns = head
        elif cells[0].startswith(row):
            at = next((at for at, name in enumerate(columns) if column in name), None)
            if at is not None and (found := _NUMBER.search(cells[at])):
                return found[0]
    raise LookupError(f"No figure of {row!r} under {column!r} in {section or 'the first table'} of {RESULTS.name}.")


def _cells(text: str) -> Iterator[list[str]]:
    """Yield the cells of each line of a table."""
    for line in text.splitlines():
        if line.startswith("|"):
            yield [cell.strip() for cell in line.strip("|").split("|")]
