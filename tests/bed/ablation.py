"""`python -m tests.bed.ablation BED [--rounds 5] [--only MECHANISM]`: does each mechanism earn its place?

A round runs the bed once with everything, and once without each mechanism in turn, in an order that each round rotates.
A figure of a mechanism is the median over the rounds of its run over that round's run with everything, with the lowest
and the highest: a mechanism whose interval has 1 inside is not told from its absence by that figure.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from .figures import FIGURES, table
from .without import MECHANISMS

ROOT = Path(__file__).parents[2]
EVERYTHING = ""
ARGUMENTS = {
    "overload": ("--seconds", "30"),
    "tenants": ("--seconds", "20", "--rounds", "1"),
    "slow": ("--seconds", "20", "--load", "0.35"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bed", choices=ARGUMENTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=MECHANISMS, action="append", help="repeatable; default: all")
    arguments = parser.parse_args()
    chosen = tuple(arguments.only or MECHANISMS)
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(arguments.rounds):
        turn = number % len(chosen)
        found = {name: run(arguments.bed, name) for name in (EVERYTHING, *chosen[turn:], *chosen[:turn])}
        rounds.append(found)
        print(table(("without", *found[EVERYTHING]), rows(rounds, chosen)), flush=True)


def run(bed: str, without: str) -> dict[str, float]:
    """Run the bed; return its figures."""
    flags = ("--without", without) if without else ()
    command = [sys.executable, "-m", f"tests.bed.{bed}", *ARGUMENTS[bed], *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(FIGURES)]
    if not lines:
        raise RuntimeError(f"{' '.join(command)} ended without figures:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    values: dict[str, float] = json.loads(lines[-1].removeprefix(FIGURES))
    print(f"{without or 'everything'}: {values}", flush=True)
    return values


def rows(rounds: list[dict[str, dict[str, float]]], chosen: tuple[str, ...]) -> list[list[str]]:
    def cell(mechanism: str, figure: str) -> str:
        ratios = [one[mechanism][figure] / one[EVERYTHING][figure] for one in rounds if one[EVERYTHING][figure]]
        if not ratios:
            return "0 with everything"
        return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"

    return [[mechanism, *(cell(mechanism, figure) for figure in rounds[0][EVERYTHING])] for mechanism in chosen]


if __name__ == "__main__":
    main()
