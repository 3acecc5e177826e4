"""`python -m tests.bench.fleet.load`: rounds of status posts at several servers by turns; plan on stdin, rates out."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import cast

import msgspec
import psutil
import uvloop

from .devices import status_request

CONNECTIONS = 300


class Plan(msgspec.Struct, frozen=True):
    """`servers`: name → port and the ids of the processes whose time counts. Device and connection have one number."""

    servers: dict[str, tuple[int, list[int]]]
    rounds: int
    reports: int  # of each connection in a round


class _Device(asyncio.Protocol):
    """Sends one request after the other; the answer has arrived when its head and its length are there."""

    def __init__(self) -> None:
        self._received = b""
        self._requests: list[bytes] = []
        self._done: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def play(self, requests: list[bytes]) -> asyncio.Future[None]:
        self._requests = requests[::-1]
        self._done = asyncio.get_running_loop().create_future()
        self._next()
        return self._done

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        if len(body) >= length:
            self._received = b""
            if not head.startswith(b"HTTP/1.1 200"):
                sys.exit(f"{head.decode()}\n{body.decode()}")
            self._next()

    def _next(self) -> None:
        assert self._transport is not None
        assert self._done is not None
        if self._requests:
            self._transport.write(self._requests.pop())
        else:
            self._done.set_result(None)


class Figures(msgspec.Struct, frozen=True):
    """Reports per second, and per second of the servers' CPU time."""

    rate: float
    per_cpu_s: float


async def play(plan: Plan) -> list[dict[str, Figures]]:
    """Return the figures of each server in each round."""
    loop = asyncio.get_running_loop()
    devices = {
        name: [(await loop.create_connection(_Device, "127.0.0.1", port))[1] for _ in range(CONNECTIONS)]
        for name, (port, _) in plan.servers.items()
    }
    rounds = []
    for turn in range(plan.rounds):
        seqs = range(1 + turn * plan.reports, 1 + (turn + 1) * plan.reports)
        requests = [[status_request(number, seq) for seq in seqs] for number in range(CONNECTIONS)]
        figures = {}
        for name, connections in devices.items():
            pids = plan.servers[name][1]
            cpu_s, began = _cpu_s(pids), time.perf_counter()
            await asyncio.gather(*(device.play(mine) for device, mine in zip(connections, requests, strict=True)))
            took_s, used_s = time.perf_counter() - began, _cpu_s(pids) - cpu_s
            count = CONNECTIONS * plan.reports
            figures[name] = Figures(count / took_s, count / used_s)
        rounds.append(figures)
    return rounds


def _cpu_s(pids: list[int]) -> float:
    """CPU time of processes and their children, by the scheduler's clock: that of psutil counts hundredths."""
    every = [*pids, *(child.pid for pid in pids for child in psutil.Process(pid).children())]
    tasks = [task for pid in every for task in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


if __name__ == "__main__":
    found = uvloop.run(play(msgspec.json.decode(sys.stdin.buffer.read(), type=Plan)))
    sys.stdout.buffer.write(msgspec.json.encode(found))
