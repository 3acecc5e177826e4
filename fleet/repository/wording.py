"""The words of the commands' output: counted things, short names of bundles, tables of plain text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

FACTORY = "factory's files"


def counted(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun: `1 box`, `2 boxes`."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def boxes(number: int) -> str:
    return counted(number, "box", "boxes")


def bundle_name(bundle: str | None) -> str:
    """Return the first digits of a bundle's id, as the console shows it; None or "": what a box runs without one."""
    return bundle[:12] if bundle else FACTORY


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table: a head in capitals, columns as wide as their longest cell. Without rows: nothing."""
    if not rows:
        return
    lines = [[name.upper() for name in head], *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
