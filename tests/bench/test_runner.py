"""`python -m tests.bench` lists everything that it runs, judges by the rows, and keeps a section for a scenario."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import pytest

from . import __main__ as runner
from .results import with_section
from .rows import Row, checks
from .scenarios import PROGRAMS, SCENARIOS, Tool

BED = Path(__file__).parents[1] / "bed"


def test_each_benchmark_and_scenario_has_a_line() -> None:
    names = [line.split()[0] for line in runner.listing().splitlines() if line.startswith("  ")]
    assert sorted(names) == sorted({*runner.benchmarks(), *SCENARIOS, *PROGRAMS})


def test_each_bed_is_a_scenario() -> None:
    modules = {path for path in BED.rglob("*.py") if "\ndef add_options(" in path.read_text(encoding="utf-8")}
    known = {BED.parent / f"{tool.module.replace('.', '/')}.py" for tool in SCENARIOS.values()}
    assert modules - known == set()
    assert all(path.is_file() for path in known)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_tells_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        runner.run_scenario(name, SCENARIOS[name], ["--help"])
    assert ended.value.code == 0
    assert "--write" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_can_be_started(name: str) -> None:
    assert callable(importlib.import_module(f"tests.{PROGRAMS[name].module}").main)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--failures", type=int, default=0)


async def main(options: argparse.Namespace) -> list[Row]:
    print("a figure of its own")
    return [Row("p99", 2.0, "s", 3.0), *checks(["a check"] * options.failures)]


@pytest.mark.parametrize(("failures", "status", "verdict"), [(0, 0, "holds"), (1, 1, "MISSES")])
def test_a_scenario_is_judged_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], failures: int, status: int, verdict: str
) -> None:
    """This module is the scenario."""
    kept = tmp_path / "RESULTS.md"
    kept.write_text("# Beds\n\n## scripted\n\nbefore\n\n## other\n\nkept\n")
    tool = Tool("bench.test_runner", "a test")
    assert runner.run_scenario("scripted", tool, ["--failures", str(failures), "--write"], kept) == status
    printed = capsys.readouterr().out
    assert "a figure of its own" in printed
    assert "p99" in printed
    assert verdict in printed
    page = kept.read_text()
    assert f"Command: `python -m tests.bench scripted --failures {failures}`," in page
    assert "```text\na figure of its own\n```" in page
    assert f"| failed checks | {failures} | ≤ 0 | {verdict} | {'a check' * failures} |" in page
    assert "before\n" not in page
    assert page.endswith("## other\n\nkept\n")


def test_a_new_section_comes_last() -> None:
    assert with_section("# A\n\n## b\n\nx\n", "## c", "## c\n\ny") == "# A\n\n## b\n\nx\n\n## c\n\ny\n"
