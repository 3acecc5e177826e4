"""`python -m tests.bench edge-ablation [--rounds 5]`: what each shortcut of the edge's HTTP side is worth.

Daemons run side by side, one with everything and one without each mechanism, and answer the requests of the rows
"cached answer" and "forwarded request", in turns of a few hundred. A figure is a daemon's processor time per request,
divided by that of the daemon with everything in the same round: the median over the rounds, the lowest and the
highest. The product has no such switches: with a mechanism's name first, this program starts a daemon without it.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from causeway_server.edge_node.daemon import lifecycle
from causeway_server.edge_node.http import api
from causeway_server.router.serving import responses
from tests.bed.figures import table
from tests.bench.whole.load import Contestant, Plan
from tests.tool import run_tool

from . import bench_edge

ROOT = Path(__file__).parents[2]
EVERYTHING = "everything"
REQUESTS = 300


def _without_header_cache() -> None:
    """The lines of a reply's headers are made for each reply."""
    vars(responses)["shared_header_lines"] = vars(responses)["shared_header_lines"].__wrapped__


def _without_body_memo() -> None:
    """A body that came before is parsed again."""
    vars(api)["_SHORT_BYTES"] = -1


def _without_gc_settings() -> None:
    """Python's own thresholds, and all objects of the start in each full collection."""
    vars(lifecycle)["tune_garbage_collector"] = lambda: None


PATCHES: Mapping[str, Callable[[], None]] = {
    EVERYTHING: lambda: None,
    "reply header cache": _without_header_cache,
    "body memo": _without_body_memo,
    "gc settings": _without_gc_settings,
}


class _Daemon(msgspec.Struct, frozen=True):
    port: int
    pid: int

    @property
    def cpu_s(self) -> float:
        """Of all threads, to the nanosecond: `cpu_times` counts in ticks of 10 ms."""
        tasks = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def main() -> None:
    if sys.argv[1:2] and sys.argv[1] in PATCHES:
        PATCHES[sys.argv.pop(1)]()
        from causeway_server.edge_node.cli.main import main as run

        run()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=20, help="of a daemon in a round")
    parser.add_argument("--only", choices=tuple(PATCHES), action="append", help="repeatable; default: all")
    arguments = parser.parse_args()
    chosen = arguments.only or [name for name in PATCHES if name != EVERYTHING]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as servers:
        upstream = servers.enter_context(_upstream())
        daemons = {
            name: servers.enter_context(_daemon(Path(folder) / str(number), upstream, name))
            for number, name in enumerate([EVERYTHING, *chosen, "everything again"])
        }
        for title, bodies in (("cached answer", bench_edge.HITS), ("forwarded request", bench_edge.PASSED)):
            rounds = [_play(daemons, bodies, arguments.turns) for _ in range(arguments.rounds + 1)][
                1:
            ]  # the first fills the caches
            base_us = statistics.median(one[EVERYTHING] for one in rounds)
            print(f"{title}: {base_us:.0f} us of processor time a request with everything")
            print(table(("without", "times"), [(name, _interval(rounds, name)) for name in daemons]), flush=True)


def _interval(rounds: list[dict[str, float]], name: str) -> str:
    ratios = [one[name] / one[EVERYTHING] for one in rounds]
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def _play(daemons: Mapping[str, _Daemon], bodies: tuple[bytes, ...], turns: int) -> dict[str, float]:
    """Return the processor time of a request by the daemon's name, us."""
    before = {name: daemon.cpu_s for name, daemon in daemons.items()}
    contestants = tuple(Contestant(name, daemon.port, bodies) for name, daemon in daemons.items())
    plan = Plan(contestants, bench_edge.ONE, REQUESTS, turns)
    command = [sys.executable, "-m", "tests.bench.whole.load"]
    subprocess.run(command, input=msgspec.json.encode(plan), cwd=ROOT, capture_output=True, check=True, timeout=300)
    return {name: 1e6 * (daemon.cpu_s - before[name]) / REQUESTS / turns for name, daemon in daemons.items()}


@contextlib.contextmanager
def _upstream() -> Iterator[int]:
    with _process([sys.executable, "-m", "tests.bench.whole.bare", "upstream", ""]) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())


@contextlib.contextmanager
def _daemon(folder: Path, upstream: int, name: str) -> Iterator[_Daemon]:
    folder.mkdir()
    policy = folder / "policy.yaml"
    policy.write_text(bench_edge.POLICY.read_text().replace("ttl: 30s", "ttl: 1h"))
    settings = {
        "policy": policy,
        "state_dir": folder / "state",
        "server.port": 0,
        "engine.enabled": "false",
        "clouds.main.url": f"http://127.0.0.1:{upstream}/v1",
        "log": "warning",
    }
    flags = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    patch = name if name in PATCHES else EVERYTHING
    with _process([sys.executable, "-m", "tests.bench.edge_ablation", patch, "serve", *flags]) as process:
        assert process.stdout is not None
        url = next(line for line in process.stdout if line.startswith(b"ready url=")).decode().strip()
        yield _Daemon(int(url.rpartition(":")[2]), process.pid)


@contextlib.contextmanager
def _process(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait(10)


if __name__ == "__main__":
    sys.exit(run_tool(main))
