"""`python -m tests.bench`: list the benchmarks and scenarios, and run, print, judge and keep them.

    python -m tests.bench                          list all
    python -m tests.bench edge decide [--write]    benchmarks: ratios within one run, beside their limits; `all`: each
    python -m tests.bench floods --seconds 10      a scenario: minutes of load and faults; `floods --help`: its options

``--write`` keeps the figures with the command and the machine: those of benchmarks in the table of
tests/bench/RESULTS.md, those of a scenario as a section of tests/bed/RESULTS.md. Exits with 1 if one misses its limit.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import importlib
import inspect
import io
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import psutil
from rich.console import Console

from tests.tool import run_tool

from .results import RESULTS, markdown_rows, origin, print_rows, with_section, with_table
from .rows import Row
from .scenarios import PROGRAMS, SCENARIOS, Tool

HERE = Path(__file__).parent
SCENARIO_RESULTS = HERE.parent / "bed" / "RESULTS.md"
ALL = "all"


class _Tee(io.TextIOBase):
    """Prints as before, and keeps what was printed."""

    def __init__(self) -> None:
        self.kept = ""
        self._out = sys.stdout

    def write(self, text: str) -> int:
        self.kept += text
        return self._out.write(text)

    def flush(self) -> None:
        self._out.flush()


def benchmarks() -> dict[str, str]:
    """Return what each benchmark is about, by its name."""
    found = {}
    for path in sorted(HERE.glob("bench_*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        found[path.stem.removeprefix("bench_")] = docstring.splitlines()[0]
    return found


def listing() -> str:
    """Return a line for each benchmark and scenario."""
    tools = {name: tool.about for name, tool in sorted((SCENARIOS | PROGRAMS).items())}
    width = max(map(len, tools | benchmarks()))
    groups = (("benchmarks", benchmarks()), ("scenarios, each with options of its own", tools))
    lines = []
    for title, found in groups:
        lines += [f"{title}:", *(f"  {name:<{width}}  {about}" for name, about in found.items())]
    return "\n".join(lines)


def run_scenario(name: str, tool: Tool, arguments: Sequence[str], page: Path = SCENARIO_RESULTS) -> int:
    """Run a scenario with its own options. Returns 1 if a figure misses its limit, or else 0.

    Args:
        name: Its name, which is also the title of its section.
        tool: Where it is.
        arguments: Its options, and `--write`.
        page: Where `--write` keeps the figures.
    """
    module = importlib.import_module(f"tests.{tool.module}")
    parser = argparse.ArgumentParser(
        prog=f"python -m tests.bench {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_options(parser)
    parser.add_argument("--write", action="store_true", help=f"keep the figures in {page.name}")
    options = parser.parse_args(arguments)
    load, started, printed = psutil.getloadavg()[0], time.monotonic(), _Tee()
    with redirect_stdout(printed):
        found = module.main(options)
        rows: list[Row] = asyncio.run(found) if inspect.isawaitable(found) else found  # type: ignore[arg-type]
    if rows:
        print_rows(Console(soft_wrap=True), rows)
    if options.write:
        command = " ".join(("python -m tests.bench", name, *(each for each in arguments if each != "--write")))
        lines = [f"## {name}", "", *origin(command, time.monotonic() - started, load), "", "```text"]
        lines += [*printed.kept.rstrip().splitlines(), "```", "", *(markdown_rows(rows) if rows else ())]
        before = page.read_text(encoding="utf-8")
        page.write_text(with_section(before, lines[0], "\n".join(lines)), encoding="utf-8")
        print(f"kept in {page}")
    return 1 if any(row.holds is False for row in rows) else 0


def run_program(name: str, arguments: Sequence[str]) -> object:
    """Run a program that reads its arguments itself."""
    sys.argv = [f"python -m tests.bench {name}", *arguments]
    return importlib.import_module(f"tests.{PROGRAMS[name].module}").main()


def run_benchmarks(arguments: Sequence[str]) -> int:
    """Run benchmarks. Returns 1 if one misses its limit, or else 0."""
    known = list(benchmarks())
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", help=f"{ALL}, or of: {', '.join(known)}; or one scenario with its options")
    parser.add_argument("--write", action="store_true", help=f"keep the table in {RESULTS.name}")
    chosen = parser.parse_args(arguments)
    names: list[str] = known if chosen.names == [ALL] else chosen.names
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"no such benchmark: {', '.join(unknown)}; `python -m tests.bench` lists all")
    console = Console(soft_wrap=True)
    rows: list[Row] = []
    load, started = psutil.getloadavg()[0], time.monotonic()
    for name in names:
        console.print(f"[dim]running {name} …[/dim]")
        rows += importlib.import_module(f"{__package__}.bench_{name}").main()
    print_rows(console, rows)
    if chosen.write:
        lines = ["# Measured figures", ""]
        lines += origin(f"python -m tests.bench {' '.join(names)}", time.monotonic() - started, load)
        lines += [
            "",
            "Each figure is a ratio or a difference of two medians of the same run, whose rounds take turns. The last",
            "column has the absolute figures. One yardstick is the time that a fixed piece of pure Python takes in the",
            "same run.",
            "",
            *markdown_rows(rows),
        ]
        RESULTS.write_text(with_table(RESULTS.read_text(), "\n".join(lines) + "\n"))
        console.print(f"kept in {RESULTS}")
    return 1 if any(row.holds is False for row in rows) else 0


def main() -> object:
    arguments = sys.argv[1:]
    if not arguments:
        print(listing())
        return 0
    name, *options = arguments
    if name in SCENARIOS:
        return run_scenario(name, SCENARIOS[name], options)
    if name in PROGRAMS:
        return run_program(name, options)
    return run_benchmarks(arguments)


if __name__ == "__main__":
    sys.exit(run_tool(main))
