"""A cached answer over HTTP, a forwarded request, and the daemon's memory and start.

Each server is a process of its own, the load generator another. Ours and the bare one take turns in short rounds; each
figure is the median of the rounds' own ratios, so that a neighbour who comes and goes counts little.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil

from tests.bench.streaming.run import process
from tests.bench.whole.load import Contestant, Plan, Round
from tests.tool import run_tool

from .rows import Row

ROOT = Path(__file__).parents[2]
POLICY = ROOT / "policies" / "default.yaml"
ONE, MANY = 1, 32  # connections
ROUNDS = 21
ASKS = 1000  # different ones, in turn: what the daemon remembers of a single ask is no help
_ASK = '{"model":"auto","messages":[{"role":"user","content":"Turn on light %d in the kitchen."}],"temperature":0}'
HITS = tuple((_ASK % number).encode() for number in range(ASKS))
HIT, PASS = "cached answer", "forwarded request"
SERVER, FORWARDER = "a bare aiohttp server's", "a bare aiohttp forwarder's"
WORDS = {"ours": "edge", "bare": "bare aiohttp", "floor": "upstream asked directly"}
PASSED = tuple(body.replace(b'"temperature":0', b'"temperature":0.2') for body in HITS)  # sampled: not cached


class Daemon(msgspec.Struct, frozen=True):
    """A daemon that is ready; it took `ready_s` seconds."""

    port: int
    ready_s: float
    pid: int

    def rss_mb(self) -> float:
        return float(psutil.Process(self.pid).memory_info().rss / 2**20)


def main() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as servers:
        directory = Path(folder)
        upstream = servers.enter_context(bare("upstream"))
        edge = servers.enter_context(daemon(directory, upstream))
        rss_mb = edge.rss_mb()
        forwarder = servers.enter_context(bare("forward", f"http://127.0.0.1:{upstream}"))
        answer = directory / "answer.json"
        answer.write_bytes(ask(edge.port, HITS[0]))
        fixed = servers.enter_context(bare("answer", str(answer)))
        return [
            *hit_rows(Contestant("ours", edge.port, HITS), Contestant("bare", fixed, HITS)),
            *passed_rows(
                Contestant("ours", edge.port, PASSED),
                Contestant("bare", forwarder, PASSED),
                Contestant("floor", upstream, PASSED),
            ),
            Row("memory (RSS) of a daemon without a model", rss_mb, "MB", 120.0),
            Row("time from the start of a daemon without a model until it is ready", edge.ready_s, "s", 2.0),
        ]


def hit_rows(*contestants: Contestant) -> list[Row]:
    with _on_one_core():
        one = _play(contestants, ONE, 1000)
    many = _play(contestants, MANY, 3000)
    slower = _median(one, lambda r: r.figures["ours"].p50_ms / r.figures["bare"].p50_ms)
    return [
        Row(f"{HIT}, {ONE} connection: the edge's median time ÷ {SERVER}", slower, "x", 1.6, note=_p50s(one)),
        Row(
            f"{HIT}, {MANY} connections: the edge's rate ÷ {SERVER}",
            _median(many, _rate),
            "x",
            0.35,
            "higher",
            _rates(many),
        ),
    ]


def passed_rows(*contestants: Contestant) -> list[Row]:
    one = _play(contestants, ONE, 400)
    with _on_one_core():
        packed = _play(contestants, ONE, 400)
    many = _play(contestants, MANY, 1500)
    return [
        Row(
            f"{PASS}, {ONE} connection: median time that the edge adds ÷ {FORWARDER}",
            _median(one, _added),
            "x",
            2.0,
            note=_p50s(one),
        ),
        Row(
            f"{PASS}, {ONE} connection, all processes on one core: median time that the edge adds ÷ {FORWARDER}",
            _median(packed, _added),
            "x",
            note=_p50s(packed),
        ),
        Row(
            f"{PASS}, {MANY} connections: the edge's rate ÷ {FORWARDER}",
            _median(many, _rate),
            "x",
            0.4,
            "higher",
            _rates(many),
        ),
    ]


def _rate(one: Round) -> float:
    return one.figures["ours"].rps / one.figures["bare"].rps


def _added(one: Round) -> float:
    """How much more than asking the upstream directly, ours against the bare forwarder."""
    floor = one.figures["floor"].p50_ms
    return (one.figures["ours"].p50_ms - floor) / (one.figures["bare"].p50_ms - floor)


def _p50s(rounds: list[Round]) -> str:
    names = rounds[0].figures
    return ", ".join(f"{WORDS[name]} {_median(rounds, lambda r: r.figures[name].p50_ms):.3f} ms" for name in names)  # noqa: B023


def _rates(rounds: list[Round]) -> str:
    names = rounds[0].figures
    return ", ".join(f"{WORDS[name]} {_median(rounds, lambda r: r.figures[name].rps):.0f}/s" for name in names)  # noqa: B023


def _median(rounds: list[Round], figure: Callable[[Round], float]) -> float:
    return statistics.median(map(figure, rounds))


@contextlib.contextmanager
def _on_one_core() -> Iterator[None]:
    """Servers and load share one core: who is asked one thing at a time waits for each of its microseconds.

    Left to itself the kernel puts the two together or apart as it likes, and a wake-up across cores costs as much as
    the request: the figures would be of two kinds.
    """
    all_cores = os.sched_getaffinity(0)
    everyone = [os.getpid(), *(child.pid for child in psutil.Process().children())]
    for pid in everyone:
        os.sched_setaffinity(pid, {min(all_cores)})
    try:
        yield
    finally:
        for pid in everyone:
            os.sched_setaffinity(pid, all_cores)


def _play(contestants: tuple[Contestant, ...], connections: int, requests: int) -> list[Round]:
    plan = Plan(contestants, connections, requests, ROUNDS)
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.whole.load"],
        input=msgspec.json.encode(plan),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
        timeout=300,
    )
    return msgspec.json.decode(done.stdout, type=list[Round])


def ask(port: int, body: bytes) -> bytes:
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return bytes(response.read())


@contextlib.contextmanager
def bare(kind: str, argument: str = "") -> Iterator[int]:
    with process("-m", "tests.bench.whole.bare", kind, argument) as (port, _):
        yield int(port)


@contextlib.contextmanager
def daemon(directory: Path, upstream: int) -> Iterator[Daemon]:
    """The daemon as users start it, without an engine; its state is in `directory`."""
    policy = directory / "policy.yaml"
    policy.write_text(POLICY.read_text().replace("ttl: 30s", "ttl: 1h"))
    settings = {
        "policy": policy,
        "state_dir": directory / "state",
        "server.port": 0,
        "engine.enabled": "false",
        "clouds.main.url": f"http://127.0.0.1:{upstream}/v1",
        "log": "warning",
    }
    flags = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    started = time.perf_counter()
    with process("-m", "causeway_server.edge_node", "serve", *flags, ready="ready url=") as (url, pid):
        ready_s = time.perf_counter() - started
        yield Daemon(int(url.rpartition(":")[2]), ready_s, pid)


def _print_rows() -> None:
    for row in main():
        print(f"{row.name}: {row.value:.2f} {row.unit} (limit {row.limit})  {row.note}")


if __name__ == "__main__":
    sys.exit(run_tool(_print_rows))
