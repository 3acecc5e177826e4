"""A device that accepts jobs while it is offline, and is killed again and again; then its cloud comes back.

The daemon is the command that operators start, on a real disk; the cloud is the gateway's `/v1/jobs` in memory, which
does each key once and counts. Every job has an `Idempotency-Key`, and clients send it until it is acknowledged.

    python -m tests.bench outbox                    10,000 jobs, 20 kills: half while offline, half while catching up
    python -m tests.bench outbox --kills 0 --accept how fast jobs are acknowledged
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from tests.bench.rows import Row
from tests.edge_node.jobs.cloud import JobCloud

from .figures import print_figures, quantile, table

POLICY = """
version: 1
name: bed
targets: {large: {at: cloud, model: m-large}}
routes: [{name: all, use: [large]}]
limits: {concurrent: 256, queue: 256}
"""
CLASSES = ("interactive", "standard", "bulk")
SHARES = (0.1, 0.6, 0.3)
IN_FLIGHT = 128  # jobs that the daemon has in the cloud at a time
_RUN_S = 0.3
_START_S = 120.0
_WINDOW_S = 5.0  # the rate is measured where jobs arrive, and a busy machine delivers them in bunches


class TimedCloud(JobCloud):
    """Takes `_RUN_S` for a job, and notes when each came first."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []
        self._came: dict[str, float] = {}

    def view(self, key: str) -> dict[str, object]:
        self.waits = time.monotonic() - self._came.setdefault(key, time.monotonic()) < _RUN_S
        return super().view(key)

    async def _create(self, request: web.Request) -> web.Response:
        before = len(self.order)
        response = await super()._create(request)
        self.times += [time.monotonic()] * (len(self.order) - before)
        return response


class Daemon:
    """`causeway-edge serve` in a process, killed and started again."""

    def __init__(self, folder: Path, cloud: str, cloud_rate_per_s: float) -> None:
        policy = folder / "policy.yaml"
        policy.write_text(POLICY)
        self.port = 0  # of the last start
        settings = {
            "policy": policy,
            "state_dir": folder / "state",
            "server.port": 0,
            "engine.enabled": "false",
            "clouds.main.url": cloud,
            "cloud.probe_interval_s": 0.2,
            "jobs.cloud_rate_per_s": cloud_rate_per_s,
            "jobs.jitter_s": 0.5,
            "jobs.cloud_concurrency": IN_FLIGHT,
            "log": "error",
        }
        flags = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        self._command = [sys.executable, "-m", "causeway_server.edge_node", "serve", *flags]
        self._process: asyncio.subprocess.Process | None = None
        self.kills = 0

    async def start(self) -> None:
        """Return when it listens; on another port each time."""
        self._process = await asyncio.create_subprocess_exec(*self._command, stdout=asyncio.subprocess.PIPE)
        assert self._process.stdout is not None
        async with asyncio.timeout(_START_S):
            async for line in self._process.stdout:
                if line.startswith(b"ready url="):
                    self.port = int(line.rpartition(b":")[2])
                    return
        raise RuntimeError("the daemon ended before it was ready")

    @property
    def cpu_s(self) -> float:
        """Processor time of the daemon since its last start."""
        assert self._process is not None
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def kill_at(self, moments: list[int], count: Callable[[], int]) -> None:
        """Kill and restart whenever `count` reaches one of the moments."""
        for moment in moments:
            while count() < moment:
                await asyncio.sleep(0.005)
            await self.kill()
            self.kills += 1
            await self.start()


class Client:
    """One connection that submits jobs until each is acknowledged."""

    def __init__(self, daemon: Daemon, webhook: str = "") -> None:
        self._daemon = daemon
        self._fields = {"webhook": webhook} if webhook else {}
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.latencies_s: list[float] = []

    async def submit(self, number: int, priority: str) -> str:
        messages = [{"role": "user", "content": f"{priority}-{number}"}]
        body = json.dumps({"model": "auto", "messages": messages, "priority": priority, **self._fields})
        head = (
            "POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Idempotency-Key: k{number}\r\n"
        )
        while True:
            started = time.perf_counter()
            try:
                status, answer = await self.ask(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            except (OSError, EOFError):
                self._streams = None
                await asyncio.sleep(0.02)
                continue
            if status == 202:
                self.latencies_s.append(time.perf_counter() - started)
                return str(json.loads(answer)["id"])
            if status not in (429, 503):
                raise AssertionError(answer)
            await asyncio.sleep(0.05)

    async def state(self, job: str) -> str:
        _, answer = await self.ask(f"GET /v1/jobs/{job} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        return str(json.loads(answer)["status"])

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._daemon.port)
        reader, writer = self._streams
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
        return int(head[9:12]), await reader.readexactly(length)


async def submit_all(clients: list[Client], jobs: list[str], ids: dict[int, str]) -> float:
    """Submit every job that was not; the seconds that it took."""
    numbers = (number for number in range(len(jobs)) if number not in ids)

    async def work(client: Client) -> None:
        for number in numbers:
            ids[number] = await client.submit(number, jobs[number])

    started = time.perf_counter()
    await asyncio.gather(*[work(client) for client in clients])
    return time.perf_counter() - started


def moments(chance: random.Random, kills: int, jobs: int) -> list[int]:
    return sorted(chance.randrange(1, jobs) for _ in range(kills))


def overtaken(order: list[str]) -> int:
    """How many jobs were sent after one of a lower class."""
    lowest, count = 0, 0
    for text in order:
        rank = CLASSES.index(text.partition("-")[0])
        count += rank < lowest
        lowest = max(lowest, rank)
    return count


def highest_rate(times: list[float]) -> float:
    """Jobs per second of the busiest `_WINDOW_S`."""
    most = start = 0
    for end, at in enumerate(times):
        while times[start] <= at - _WINDOW_S:
            start += 1
        most = max(most, end - start + 1)
    return most / _WINDOW_S


async def run(arguments: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Return the figures."""
    chance = random.Random(arguments.seed)
    jobs = chance.choices(CLASSES, SHARES, k=arguments.jobs)
    cloud = TimedCloud()
    cloud.be_away()
    daemon = Daemon(folder, cloud.url, arguments.steady)
    await daemon.start()
    clients = [Client(daemon, arguments.webhook) for _ in range(arguments.clients)]
    ids = {0: await Client(daemon).submit(0, jobs[0])}  # with the first job the daemon opens its outbox
    offline = moments(chance, arguments.kills // 2, arguments.jobs)
    killer = asyncio.create_task(daemon.kill_at(offline, lambda: len(ids)))
    cpu_s = daemon.cpu_s
    try:
        accepting_s = await submit_all(clients, jobs, ids)
        await killer
        latencies = [value for client in clients for value in client.latencies_s]
        figures = {
            "accepted_per_s": len(ids) / accepting_s,
            "accept_p50_ms": quantile(latencies, 0.5) * 1000.0,
            "accept_p99_ms": quantile(latencies, 0.99) * 1000.0,
        }
        if arguments.accept:
            return figures | {"cpu_ms_per_job": (daemon.cpu_s - cpu_s) / len(ids) * 1000.0}
        await cloud.come_back()
        await daemon.kill_at(moments(chance, arguments.kills - len(offline), arguments.jobs), lambda: len(cloud.order))
        states = await all_states(Client(daemon), ids)
        return figures | {
            "kills": daemon.kills,
            "lost": sum(state != "succeeded" for state in states),
            "doubled": sum(count - 1 for count in cloud.effects.values()) + len(cloud.effects) - len(set(ids)),
            "sent_twice": cloud.submissions - len(cloud.order),
            "overtaken": overtaken(cloud.order),
            "sent_per_s": highest_rate(cloud.times),
        }
    finally:
        await daemon.kill()
        await cloud.stop()


def judge(figures: dict[str, float], arguments: argparse.Namespace) -> dict[str, bool]:
    """Return the aims, and whether each was met."""
    if arguments.accept:
        fast = figures["accepted_per_s"] >= 2000.0 and figures["accept_p99_ms"] < 20.0
        return {"2,000 jobs a second at a p99 under 20 ms": fast}
    return {
        "nothing lost": figures["lost"] == 0,
        "nothing doubled": figures["doubled"] == 0,
        # What was in flight when the daemon was killed is sent again.
        "critical first": figures["overtaken"] <= figures["kills"] * IN_FLIGHT,
        "at most 3 times the steady rate": figures["sent_per_s"] <= 3.0 * arguments.steady * 1.01,
    }


async def all_states(client: Client, ids: dict[int, str]) -> list[str]:
    """The state of each job, once it has ended."""
    states = []
    for job in ids.values():
        while (state := await client.state(job)) in ("queued", "waiting", "running"):
            await asyncio.sleep(0.1)
        states.append(state)
    return states


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument(
        "--steady", type=float, default=50.0, help="jobs per second: the daemon's jobs.cloud_rate_per_s"
    )
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--webhook", default="", help="URL that each job names, such as https://example.com/hook")
    parser.add_argument("--accept", action="store_true", help="only accept, and judge how fast")


def main(arguments: argparse.Namespace) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(run(arguments, Path(folder)))
    judged = judge(figures, arguments)
    print(table(("figure", "value"), list(figures.items())))
    print_figures(figures)
    return [Row(name, int(good), "", 1.0, "higher") for name, good in judged.items()]
