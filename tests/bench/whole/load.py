"""`python -m tests.bench.whole.load < PLAN`: a load generator in a process of its own.

It posts each contestant's bodies in turn, again and again, over kept connections, by a raw protocol on uvloop. The
contestants take turns in short rounds: a neighbour on the machine disturbs them all alike. Prints the figures of each
round as JSON.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
import sys
import time
from collections.abc import Iterator
from typing import cast

import msgspec
import uvloop

TIMEOUT_S = 60.0


class Contestant(msgspec.Struct, frozen=True):
    name: str
    port: int
    bodies: tuple[bytes, ...]
    ca_file: str = ""  # of its certificate; "": no TLS


class Plan(msgspec.Struct, frozen=True):
    contestants: tuple[Contestant, ...]
    connections: int
    requests: int  # of one round of one contestant
    rounds: int


class Figures(msgspec.Struct, frozen=True):
    rps: float
    p50_ms: float
    p99_ms: float


class Round(msgspec.Struct, frozen=True):
    figures: dict[str, Figures]


class _Client(asyncio.Protocol):
    def __init__(
        self, requests: Iterator[bytes], left: list[int], times: list[int], done: asyncio.Future[None]
    ) -> None:
        self._requests = requests
        self._left = left
        self._times = times
        self._done = done
        self._expected = -1
        self._received = 0
        self._started = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one by behaviour only
        self._next()

    def _next(self) -> None:
        if self._left[0] == 0:
            if not self._done.done():
                self._done.set_result(None)
            self._transport.close()
            return
        self._left[0] -= 1
        self._expected = -1
        self._received = 0
        request = next(self._requests)
        self._started = time.perf_counter_ns()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        if self._expected < 0:
            if not data.startswith(b"HTTP/1.1 200"):
                self._fail(data)
                return
            end = data.index(b"\r\n\r\n") + 4
            at = data.lower().index(b"content-length: ") + 16
            self._expected = end + int(data[at : data.index(b"\r", at)])
        self._received += len(data)
        if self._received >= self._expected:
            self._times.append(time.perf_counter_ns() - self._started)
            self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(b"the server closed the connection")

    def _fail(self, data: bytes) -> None:
        if not self._done.done():
            self._done.set_exception(RuntimeError(data[:500].decode(errors="replace")))


def _request(body: bytes) -> bytes:
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _tls(ca_file: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca_file)
    one_cipher(context)
    return context


def one_cipher(context: ssl.SSLContext) -> None:
    """Let a context have the same cipher for each peer: of TLS 1.3's they choose different ones."""
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("ECDHE-ECDSA-AES128-GCM-SHA256")


async def _measure(contestant: Contestant, connections: int, requests: int) -> Figures:
    turns = itertools.cycle([_request(body) for body in contestant.bodies])
    loop = asyncio.get_running_loop()
    times: list[int] = []
    left = [requests]
    ends: list[asyncio.Future[None]] = [loop.create_future() for _ in range(connections)]
    clients = [_Client(turns, left, times, end) for end in ends]
    started = time.perf_counter()
    for client in clients:
        await loop.create_connection(
            lambda client=client: client,
            "127.0.0.1",
            contestant.port,
            ssl=_tls(contestant.ca_file) if contestant.ca_file else None,
        )
    await asyncio.wait_for(asyncio.gather(*ends), TIMEOUT_S)
    took_s = time.perf_counter() - started
    times.sort()
    return Figures(len(times) / took_s, times[len(times) // 2] / 1e6, times[len(times) * 99 // 100] / 1e6)


async def run(plan: Plan) -> list[Round]:
    rounds = []
    for number in range(plan.rounds + 1):
        figures = {c.name: await _measure(c, plan.connections, plan.requests) for c in plan.contestants}
        if number:  # the first one warms up
            rounds.append(Round(figures))
    return rounds


if __name__ == "__main__":
    uvloop.install()
    told = asyncio.run(run(msgspec.json.decode(sys.stdin.buffer.read(), type=Plan)))
    print(msgspec.json.encode(told).decode(), flush=True)
