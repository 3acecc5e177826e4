"""`python -m tests.bench.load PORT CONNECTIONS REQUESTS BODY_FILE`: one POST again and again over kept connections.

A raw protocol on uvloop, so that the generator costs little beside what it measures. Prints one line of JSON: requests
per second, and the p50 and p99 of a request in ms.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import cast

import msgspec
import uvloop


class Figures(msgspec.Struct, frozen=True):
    rps: float
    p50_ms: float
    p99_ms: float


class _Client(asyncio.Protocol):
    def __init__(self, request: bytes, left: list[int], times: list[int], done: asyncio.Future[None]) -> None:
        self._request = request
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
            return
        self._left[0] -= 1
        self._expected = -1
        self._received = 0
        self._started = time.perf_counter_ns()
        self._transport.write(self._request)

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


async def measure(port: int, connections: int, requests: int, body: bytes) -> Figures:
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()
    loop = asyncio.get_running_loop()
    times: list[int] = []
    left = [requests]
    started = time.perf_counter()
    waiting = []
    for _ in range(connections):
        done: asyncio.Future[None] = loop.create_future()
        waiting.append(done)
        await loop.create_connection(lambda: _Client(head + body, left, times, waiting[-1]), "127.0.0.1", port)
    await asyncio.gather(*waiting)
    took_s = time.perf_counter() - started
    times.sort()
    return Figures(len(times) / took_s, times[len(times) // 2] / 1e6, times[len(times) * 99 // 100] / 1e6)


if __name__ == "__main__":
    uvloop.install()
    figures = asyncio.run(measure(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]).read_bytes()))
    print(msgspec.json.encode(figures).decode(), flush=True)
