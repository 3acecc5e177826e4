"""(b) an exact hit over HTTP, (c) a request that is passed on, (f) the daemon's memory and start.

Each server is a process of its own, the load generator another. Ours and the bare one take turns in short rounds, so
that a neighbour on the machine disturbs both; the medians of the rounds are compared.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

from .load import Figures
from .rows import Row

ROOT = Path(__file__).parents[2]
POLICY = ROOT / "policies" / "default.yaml"
ROUNDS = 7
ONE, MANY = 1, 32  # connections
REQUESTS = {ONE: 1500, MANY: 4000}  # of one round
HIT = b'{"model":"auto","messages":[{"role":"user","content":"Turn on the lights in the kitchen."}],"temperature":0}'
PASSED = HIT.replace(b',"temperature":0', b"")  # sampled: not cached


def main() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as servers:
        directory = Path(folder)
        upstream = servers.enter_context(_bare("upstream"))
        edge, ready_s, rss_mb = servers.enter_context(_daemon(directory, upstream))
        forwarder = servers.enter_context(_bare("forward", f"http://127.0.0.1:{upstream}"))
        answer = directory / "answer.json"
        answer.write_bytes(_ask(edge, HIT))
        bare = servers.enter_context(_bare("answer", str(answer)))
        hits = _Contest(directory, HIT, edge, bare, bare)
        passed = _Contest(directory, PASSED, edge, forwarder, upstream)
        return [*hits.rows("(b) exact hit", 1.6, 0.35), *_passed_rows(passed), *_light_rows(ready_s, rss_mb)]


class _Contest:
    """Medians of `ROUNDS` rounds for ours, the bare one, and what both have in front of them."""

    def __init__(self, directory: Path, body: bytes, ours: int, bare: int, floor: int) -> None:
        self._body = directory / f"{len(body)}.json"
        self._body.write_bytes(body)
        self._ports = {"ours": ours, "bare": bare, "floor": floor}
        self.at = {connections: self._median(connections) for connections in (ONE, MANY)}

    def _median(self, connections: int) -> dict[str, Figures]:
        rounds: dict[str, list[Figures]] = {name: [] for name in self._ports}
        measured: dict[tuple[int, int], Figures] = {}
        for number in range(ROUNDS + 1):
            measured.clear()
            for name, port in self._ports.items():
                if (number, port) not in measured:
                    measured[number, port] = _load(port, connections, REQUESTS[connections], self._body)
                if number:  # the first round warms up
                    rounds[name].append(measured[number, port])
        return {name: _middle(figures) for name, figures in rounds.items()}

    def rows(self, name: str, slower: float, fewer: float) -> list[Row]:
        one, many = self.at[ONE], self.at[MANY]
        p50 = f"{one['ours'].p50_ms:.3f} ms, bare aiohttp {one['bare'].p50_ms:.3f} ms"
        rps = f"{many['ours'].rps:.0f}/s, bare aiohttp {many['bare'].rps:.0f}/s"
        return [
            Row(f"{name}, p50 at {ONE}", one["ours"].p50_ms / one["bare"].p50_ms, "x", slower, note=p50),
            Row(f"{name}, rate at {MANY}", many["ours"].rps / many["bare"].rps, "x", fewer, "higher", rps),
        ]


def _passed_rows(contest: _Contest) -> list[Row]:
    one, many = contest.at[ONE], contest.at[MANY]
    floor = one["floor"].p50_ms
    ours_ms, bare_ms = one["ours"].p50_ms - floor, one["bare"].p50_ms - floor
    added = f"adds {ours_ms:.3f} ms, bare forwarder {bare_ms:.3f} ms, to {floor:.3f} ms"
    rps = f"{many['ours'].rps:.0f}/s, bare forwarder {many['bare'].rps:.0f}/s"
    return [
        Row(f"(c) passed on, added p50 at {ONE}", ours_ms / bare_ms, "x", 2.0, note=added),
        Row(f"(c) passed on, rate at {MANY}", many["ours"].rps / many["bare"].rps, "x", 0.4, "higher", rps),
    ]


def _light_rows(ready_s: float, rss_mb: float) -> list[Row]:
    return [
        Row("(f) memory without the model", rss_mb, "MB", 120.0),
        Row("(f) start to ready", ready_s, "s", 2.0),
    ]


def _middle(figures: list[Figures]) -> Figures:
    return Figures(*(statistics.median(getattr(one, name) for one in figures) for name in Figures.__struct_fields__))


def _load(port: int, connections: int, requests: int, body: Path) -> Figures:
    command = [sys.executable, "-m", "tests.bench.load", str(port), str(connections), str(requests), str(body)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=120)
    return msgspec.json.decode(done.stdout, type=Figures)


def _ask(port: int, body: bytes) -> bytes:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        return bytes(response.read())


@contextlib.contextmanager
def _bare(kind: str, argument: str = "") -> Iterator[int]:
    with _process([sys.executable, "-m", "tests.bench.bare", kind, argument]) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())


@contextlib.contextmanager
def _daemon(directory: Path, upstream: int) -> Iterator[tuple[int, float, float]]:
    """The daemon as users start it, without an engine: its port, seconds to ready, MB at rest."""
    policy = directory / "policy.yaml"
    policy.write_text(POLICY.read_text().replace("ttl: 30s", "ttl: 1h"))
    settings = {
        "policy": policy,
        "state_dir": directory / "state",
        "server.port": 0,
        "engine.enabled": "false",
        "cloud.url": f"http://127.0.0.1:{upstream}/v1",
        "log": "warning",
    }
    flags = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    started = time.perf_counter()
    with _process([sys.executable, "-m", "edge_node", "serve", *flags]) as process:
        assert process.stdout is not None
        url = next(line for line in process.stdout if line.startswith(b"ready url=")).decode().strip()
        ready_s = time.perf_counter() - started
        rss_mb = psutil.Process(process.pid).memory_info().rss / 2**20
        yield int(url.rpartition(":")[2]), ready_s, rss_mb


@contextlib.contextmanager
def _process(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait(10)


if __name__ == "__main__":
    for row in main():
        print(f"{row.name}: {row.value:.2f} {row.unit} (limit {row.limit})  {row.note}")
