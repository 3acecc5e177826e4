"""`python -m tests.bench ablation BED [--rounds 5]`: what each mechanism is worth; BED `virtual`: in virtual time.

A bed runs once with everything, and once without each mechanism in turn, in an order that each round rotates. In
virtual time (`tests.bench virtual`) each mechanism is left out of the scenarios where it can matter, with answers of
one length and of many, and a round is a seed.

A figure of a mechanism is the median over the rounds of its run over that round's run with everything, with the lowest
and the highest: an interval that contains 1 shows no effect of the mechanism.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from tests.bench.rows import Row

from .figures import FIGURES, table
from .without import MECHANISMS

ROOT = Path(__file__).parents[2]
EVERYTHING = ""
ARGUMENTS = {
    "overload": ("--seconds", "30"),
    "tenants": ("--seconds", "20", "--rounds", "1"),
    "slow": ("--seconds", "20", "--load", "0.35"),
}

_TENANTS = ("kept places", "preemption", "bunching", "credits")
WHERE = {
    "overload": (*_TENANTS, "shares by device"),
    "tenants": _TENANTS,
    "fanout": _TENANTS,
    "slow": ("trust",),
    "hiccups": ("trust",),
    "joining": ("trust",),
    "idle": ("warm-up",),
    "stalls": ("lag correction",),
}
"""The scenarios in virtual time, and the mechanisms that can matter in each."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bed", choices=(*ARGUMENTS, "virtual"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=MECHANISMS, action="append", help="repeatable; default: all")


def main(arguments: argparse.Namespace) -> list[Row]:
    chosen = tuple(arguments.only or MECHANISMS)
    if arguments.bed == "virtual":
        in_virtual_time(arguments.rounds, chosen)
        return []
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(arguments.rounds):
        turn = number % len(chosen)
        found = {name: run(arguments.bed, name) for name in (EVERYTHING, *chosen[turn:], *chosen[:turn])}
        rounds.append(found)
        print(table(("without", *found[EVERYTHING]), rows(rounds, chosen)), flush=True)
    return []


def in_virtual_time(count: int, chosen: tuple[str, ...]) -> None:
    """Print a table for each scenario: the figures with everything, and the ratios without each mechanism."""
    for scenario, mechanisms in WHERE.items():
        names = [name for name in mechanisms if name in chosen]
        for lengths in ((), ("--mixed",)) if names else ():
            arguments = (scenario, "--rounds", str(count), *lengths)
            found = {name: figures_of("virtual", arguments, name) for name in (EVERYTHING, *names)}
            rounds = [{name: values[at] for name, values in found.items()} for at in range(count)]
            whole = found[EVERYTHING]
            medians = [f"{statistics.median(one[figure] for one in whole):.3f}" for figure in whole[0]]
            print(f"\n{scenario}, answers of {'many lengths' if lengths else 'one length'}")
            print(table(("without", *whole[0]), [["nothing", *medians], *rows(rounds, tuple(names))]), flush=True)


def run(bed: str, without: str) -> dict[str, float]:
    """Run the bed; return its figures."""
    values = figures_of(bed, ARGUMENTS[bed], without)[-1]
    print(f"{without or 'everything'}: {values}", flush=True)
    return values


def figures_of(bed: str, arguments: tuple[str, ...], without: str) -> list[dict[str, float]]:
    """Run the bed; return all the figures that it prints."""
    flags = ("--without", without) if without else ()
    command = [sys.executable, "-m", "tests.bench", bed, *arguments, *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = [line.removeprefix(FIGURES) for line in done.stdout.splitlines() if line.startswith(FIGURES)]
    if not found:
        raise RuntimeError(f"{' '.join(command)} ended without figures:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return [json.loads(each) for each in found]


def rows(rounds: list[dict[str, dict[str, float]]], chosen: tuple[str, ...]) -> list[list[str]]:
    def cell(mechanism: str, figure: str) -> str:
        ratios = [one[mechanism][figure] / one[EVERYTHING][figure] for one in rounds if one[EVERYTHING][figure]]
        if not ratios:
            return "0 with everything"
        return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"

    return [[mechanism, *(cell(mechanism, figure) for figure in rounds[0][EVERYTHING])] for mechanism in chosen]
