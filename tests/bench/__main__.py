"""`python -m tests.bench [name ...] [--write]`: run the benchmarks, print each ratio beside its limit.

``--write`` keeps the table in tests/bench/RESULTS.md with the command and the machine; the sections below it stay.
"""

from __future__ import annotations

import argparse
import importlib
import platform
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from tests.tool import run_tool

from .rows import Row

HERE = Path(__file__).parent
RESULTS = HERE / "RESULTS.md"
VERDICT = {True: "holds", False: "MISSES", None: ""}


def available() -> list[str]:
    return sorted(p.stem.removeprefix("bench_") for p in HERE.glob("bench_*.py"))


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
    return f"{'≤' if row.better == 'lower' else '≥'} {row.limit:g} {row.unit}"


def cells(row: Row) -> tuple[str, str, str, str, str]:
    return row.name, f"{row.value:.3g} {row.unit}", limit_of(row), VERDICT[row.holds], row.note


def markdown(names: list[str], rows: list[Row], took_s: float) -> str:
    command = f"python -m tests.bench {' '.join(names)}"
    lines = [
        "# Measured figures",
        "",
        f"Command: `{command}`,",
        f"{took_s:.0f} s, {datetime.now(UTC):%Y-%m-%d}.",
        f"Machine: {machine()}; load before the run {psutil.getloadavg()[0]:.1f}.",
        "",
        "Each figure is a ratio or difference within one run, of medians over interleaved rounds; the absolute figures",
        "behind it are in the last column.",
        "",
        "| what | measured | limit | | behind it |",
        "|---|---|---|---|---|",
    ]
    lines += ["| " + " | ".join(c.replace("|", "/") for c in cells(row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def with_section(page: str, title: str, section: str) -> str:
    """Put `section` in place of the one with this title ("## …"), or at the end."""
    before, found, after = page.partition(f"\n{title}\n")
    rest = after[after.find("\n## ") :] if "\n## " in after else ""
    return f"{before.rstrip()}\n\n{section.rstrip()}\n{rest if found else ''}"


def with_table(page: str, table: str) -> str:
    """Put `table` in place of the page's beginning, up to its first section."""
    _, found, sections = page.partition("\n## ")
    return table + found + sections


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"which ones; default all: {', '.join(available())}")
    parser.add_argument("--write", action="store_true", help=f"keep the table in {RESULTS.name}")
    args = parser.parse_args()
    names: list[str] = args.names or available()
    if unknown := sorted(set(names) - set(available())):
        parser.error(f"no such benchmark: {', '.join(unknown)}; there are: {', '.join(available())}")
    console = Console(soft_wrap=True)
    rows: list[Row] = []
    started = time.monotonic()
    for name in names:
        console.print(f"[dim]running {name} …[/dim]")
        rows += importlib.import_module(f"{__package__}.bench_{name}").main()
    table = Table("what", "measured", "limit", "", "behind it")
    for row in rows:
        table.add_row(*cells(row), style="red" if row.holds is False else None)
    console.print(table)
    if args.write:
        RESULTS.write_text(with_table(RESULTS.read_text(), markdown(names, rows, time.monotonic() - started)))
        console.print(f"kept in {RESULTS}")
    return 1 if any(row.holds is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(run_tool(main))
