"""`python -m tests.bench.streaming.load < PLAN`: many streams at once, against one server after the other.

A process of its own, over kept connections, by a raw protocol on uvloop. In each round every server answers the same
number of streams, so that other work on the machine disturbs all of them alike. Prints the figures of each round as
JSON.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import time
from functools import partial
from typing import cast

import msgspec
import uvloop

TIMEOUT_S = 120.0
FIRST, DONE, END = b" tok0", b"[DONE]", b"0\r\n\r\n"
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
ENDS = {CHAT: DONE, MESSAGES: b"event: message_stop"}  # of streams
WHOLE = {CHAT: b'"total_tokens":', MESSAGES: b'"output_tokens":'}  # near the end of an answer that is not streamed


class Server(msgspec.Struct, frozen=True):
    name: str
    port: int
    pids: tuple[int, ...] = ()  # of its processes, for their CPU time
    tokens: int = 0  # of each of its streams; 0: as the plan says
    header: str = ""  # a header line that it needs
    whole: bool = False  # whether its answers are not streamed
    times: int = 1  # answers on each connection, in each round
    path: str = CHAT


class Plan(msgspec.Struct, frozen=True):
    servers: tuple[Server, ...]
    model: str
    streams: int  # at once
    tokens: int
    rounds: int


class Figures(msgspec.Struct, frozen=True):
    first_ms: float  # median of the streams
    whole_ms: float  # median of the streams
    cpu_ms: float  # of the server's processes, per answer


Round = dict[str, Figures]


class _Stream(asyncio.Protocol):
    """One kept connection: `ask` sends the request and returns the seconds to the first token and to the end."""

    def __init__(self, path: str) -> None:
        self._end, self._whole = ENDS[path], WHOLE[path]
        self._done: asyncio.Future[tuple[float, float]] | None = None
        self._seen = b""
        self._tokens = 0
        self._started = self._first = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one by behaviour only

    def ask(self, request: bytes) -> asyncio.Future[tuple[float, float]]:
        self._seen, self._first = b"", 0.0
        self._done = asyncio.get_running_loop().create_future()
        self._started = time.perf_counter()
        self._transport.write(request)
        return self._done

    def close(self) -> None:
        self._done = None
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._seen += data
        if not self._first and FIRST in self._seen:
            self._first = time.perf_counter() - self._started
        if self._done is not None and self._is_whole:
            self._done.set_result((self._first, time.perf_counter() - self._started))
            self._done = None

    @property
    def _is_whole(self) -> bool:
        seen = self._seen
        return (seen.endswith(END) and self._end in seen) or (seen.endswith(b"}") and self._whole in seen)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(RuntimeError(f"the server closed the connection after {self._seen[-500:]!r}"))


def cpu_s(pids: tuple[int, ...]) -> float:
    """CPU time of these processes, from their own clocks (clock_getcpuclockid(3)), which count nanoseconds."""
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


def _request(server: Server, plan: Plan) -> bytes:
    body = msgspec.json.encode(
        {
            "model": plan.model,
            "messages": [{"role": "user", "content": "Turn on the light in the kitchen."}],
            "temperature": 0.7,  # a sampled answer is not cached
            "max_tokens": server.tokens or plan.tokens,
            "stream": not server.whole,
        }
    )
    head = f"POST {server.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}{server.header}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def _measure(server: Server, plan: Plan, streams: list[_Stream]) -> Figures:
    request = _request(server, plan)
    before_s = cpu_s(server.pids)
    answers = asyncio.gather(*(_ask(stream, request, server.times) for stream in streams))
    times = list(itertools.chain(*await asyncio.wait_for(answers, TIMEOUT_S)))
    took_s = cpu_s(server.pids) - before_s
    if not all(first for first, _ in times):
        raise RuntimeError(f"{server.name} sent a stream without its first token")
    return Figures(
        1e3 * statistics.median(first for first, _ in times),
        1e3 * statistics.median(whole for _, whole in times),
        1e3 * took_s / len(times),
    )


async def _ask(stream: _Stream, request: bytes, times: int) -> list[tuple[float, float]]:
    return [await stream.ask(request) for _ in range(times)]


async def _connect(server: Server, count: int) -> list[_Stream]:
    loop, stream = asyncio.get_running_loop(), partial(_Stream, server.path)
    return [(await loop.create_connection(stream, "127.0.0.1", server.port))[1] for _ in range(count)]


async def run(plan: Plan) -> list[Round]:
    connected = [(server, await _connect(server, plan.streams)) for server in plan.servers]
    rounds = []
    for number in range(plan.rounds + 1):
        figures = {}
        for server, streams in connected:
            figures[server.name] = await _measure(server, plan, streams)
        if number:  # the first one warms up
            rounds.append(figures)
    for _, streams in connected:
        for stream in streams:
            stream.close()
    return rounds


if __name__ == "__main__":
    print(msgspec.json.encode(uvloop.run(run(msgspec.json.decode(sys.stdin.buffer.read(), type=Plan)))).decode())
