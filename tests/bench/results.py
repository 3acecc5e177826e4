"""How figures are printed, judged and kept: one table of rows, and pages of results with a section for each run."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from .rows import Row

RESULTS = Path(__file__).with_name("RESULTS.md")
HEADS = ("what", "measured", "limit", "", "behind it")
_VERDICT = {True: "holds", False: "MISSES", None: ""}


def machine() -> str:
    try:
        model = next(
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        )
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    memory_gb = psutil.virtual_memory().total / 2**30
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    return f"{psutil.cpu_count()} cores {model}, {memory_gb:.0f} GiB, {system}"


def limit_of(row: Row) -> str:
    if row.limit is None:
        return ""
    return f"{'≤' if row.better == 'lower' else '≥'} {row.limit:g} {row.unit}".rstrip()


def cells(row: Row) -> tuple[str, str, str, str, str]:
    return row.name, f"{row.value:.3g} {row.unit}".rstrip(), limit_of(row), _VERDICT[row.holds], row.note


def print_rows(console: Console, rows: Sequence[Row]) -> None:
    table = Table(*HEADS)
    for row in rows:
        table.add_row(*cells(row), style="red" if row.holds is False else None)
    console.print(table)


def markdown_rows(rows: Sequence[Row]) -> list[str]:
    """Return the lines of the table."""
    lines = [f"| {' | '.join(HEADS)} |".replace("|  |", "| |"), "|---|---|---|---|---|"]
    return lines + ["| " + " | ".join(cell.replace("|", "/") for cell in cells(row)) + " |" for row in rows]


def origin(command: str, took_s: float, load: float) -> list[str]:
    """Return the lines that say what was run, when and where; `load` is the machine's before the run."""
    return [
        f"Command: `{command}`,",
        f"{took_s:.0f} s, {datetime.now(UTC):%Y-%m-%d}.",
        f"Machine: {machine()}; load before the run {load:.1f}.",
    ]


def with_section(page: str, title: str, section: str) -> str:
    """Put `section` in place of the one with this title ("## …"), or at the end."""
    before, found, after = page.partition(f"\n{title}\n")
    rest = after[after.find("\n## ") :] if "\n## " in after else ""
    return f"{before.rstrip()}\n\n{section.rstrip()}\n{rest if found else ''}"


def with_table(page: str, table: str) -> str:
    """Put `table` in place of the page's beginning, up to its first section."""
    _, found, sections = page.partition("\n## ")
    return table + found + sections
