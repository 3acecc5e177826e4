"""`python -m tests.bench.peers.load < PLAN`: a closed loop over kept connections, against one server.

A process of its own. A reply that is not a 200 with the upstream's answer in it, or a stream that lacks a token or its
end, ends the run. Prints the figures of each scenario as JSON.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, cast

import httptools
import msgspec
import psutil
import uvloop

from tests.bench.streaming.load import cpu_s

MARKER, TOKEN = b"an answer of the upstream", " tokn"
HIT_PROMPTS = 100
WARM_UP_S, TIMEOUT_S = 0.3, 60.0
WORDS = (
    "anchor basil candle drawer engine feather garden hinge island jacket kettle ladder mirror needle orchard pillow "
    "quarry ribbon saddle teapot umbrella valley window yellow zipper bridge carpet dolphin emerald fountain glacier"
).split()


class Scenario(msgspec.Struct, frozen=True):
    """Requests of one kind, `connections` at once, for `seconds`."""

    name: str
    kind: str  # pass: sampled, so not cached | stream: the same, streamed | hit: asked before, at temperature 0
    connections: int
    seconds: float


class Plan(msgspec.Struct, frozen=True):
    port: int
    model: str
    tokens: int  # of a stream
    pid: int  # the server's first process; 0: its cost is not measured
    upstream: int  # process
    core: int  # the one of this process and of the upstream
    scenarios: tuple[Scenario, ...]


class Figures(msgspec.Struct, frozen=True):
    requests: int
    rate: float  # 1/s
    p50_ms: float
    first_ms: float  # to the first token of a stream; 0 without streams
    cpu_us: float  # of the server's processes, a request
    busy: float  # share of this process's core that was in use
    generator: float  # the part of it that this process and the upstream used


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None


class _Event(msgspec.Struct):
    choices: tuple[_Choice, ...] = ()


_decode_event = msgspec.json.Decoder(_Event).decode


def prompts(plan: Plan, kind: str) -> Iterator[bytes]:
    """Return requests that differ in the words of their prompt."""
    chance = random.Random(0)
    parts = [" ".join(chance.choices(WORDS, k=12)) for _ in range(256)]
    rest = f'"temperature":{0 if kind == "hit" else 0.7},"max_tokens":256,"stream":{str(kind == "stream").lower()}'
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{plan.port}\r\nContent-Type: application/json\r\n"
        "Accept: */*\r\nAuthorization: Bearer none\r\nContent-Length: "
    )
    system = '{"role":"system","content":"You are a concise assistant. Answer in one paragraph."}'
    for number in itertools.count():
        words = " ".join((f"{number} {kind}", *chance.choices(parts, k=4)))
        body = f'{{"model":"{plan.model}","messages":[{system},{{"role":"user","content":"{words}"}}],{rest}}}'
        yield f"{head}{len(body)}\r\n\r\n{body}".encode()


class Run:
    """What the connections of one scenario share: the requests, when to stop, and what was measured."""

    def __init__(self, requests: Iterator[bytes], connections: int, until: float, tokens: int) -> None:
        self._requests = requests
        self._until = until
        self._open = connections
        self.tokens = tokens  # 0: no stream
        self.times: list[float] = []  # s
        self.firsts: list[float] = []  # s
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def next(self) -> bytes | None:
        """Return the next request, or None at the end."""
        request = next(self._requests, None) if time.perf_counter() < self._until else None
        if request is None:
            self._open -= 1
            if self._open == 0 and not self.done.done():
                self.done.set_result(None)
        return request

    def fail(self, fault: str) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(fault))


class _Connection(asyncio.Protocol):
    def __init__(self, run: Run) -> None:
        self._run = run
        self._asking = False
        self._started = self._first = 0.0
        self._reply = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._line = b""  # the beginning of an event
        self._tokens = 0
        self._ended = False  # by [DONE]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one by behaviour only
        self._ask()

    def _ask(self) -> None:
        request = self._run.next()
        self._asking = request is not None
        if request is None:
            self._transport.close()
            return
        self._body, self._line, self._tokens, self._ended, self._first = [], b"", 0, False, 0.0
        self._started = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        try:
            self._reply.feed_data(data)
        except httptools.HttpParserError as fault:
            self._run.fail(f"{fault!r}: {data[:500]!r}")

    def connection_lost(self, exc: Exception | None) -> None:
        if self._asking:
            self._run.fail("the server closed the connection")

    def on_body(self, data: bytes) -> None:
        if not self._run.tokens:
            self._body.append(data)
            return
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                self._take_token(line[6:])
            elif line.startswith(b"data: [DONE]"):
                self._ended = True

    def _take_token(self, event: bytes) -> None:
        choices = _decode_event(event).choices
        if choices and choices[0].delta is not None and choices[0].delta.content == TOKEN:
            self._tokens += 1
            if self._tokens == 1:
                self._first = time.perf_counter() - self._started

    def on_message_complete(self) -> None:
        took_s = time.perf_counter() - self._started
        status, run = self._reply.get_status_code(), self._run
        complete = self._ended and self._tokens == run.tokens if run.tokens else MARKER in b"".join(self._body)
        if status != 200 or not complete or not self._reply.should_keep_alive():
            run.fail(f"a reply {status} with {self._tokens} tokens: {b''.join(self._body)[:500]!r}")
            return
        run.times.append(took_s)
        run.firsts.append(self._first)
        self._ask()


async def play(plan: Plan, requests: Iterator[bytes], scenario: Scenario, seconds: float) -> Run:
    """Keep `connections` requests in flight for `seconds`."""
    tokens = plan.tokens if scenario.kind == "stream" else 0
    run = Run(requests, scenario.connections, time.perf_counter() + seconds, tokens)
    loop = asyncio.get_running_loop()
    for _ in range(scenario.connections):
        await loop.create_connection(lambda: _Connection(run), "127.0.0.1", plan.port)
    await asyncio.wait_for(run.done, TIMEOUT_S)
    return run


async def measure(plan: Plan, scenario: Scenario) -> Figures:
    requests = prompts(plan, scenario.kind)
    if scenario.kind == "hit":
        asked = list(itertools.islice(requests, HIT_PROMPTS))
        await play(plan, iter(asked), msgspec.structs.replace(scenario, connections=1), TIMEOUT_S)
        requests = itertools.cycle(asked)
    await play(plan, requests, scenario, WARM_UP_S)
    before, started = _Clocks.read(plan), time.perf_counter()
    run = await play(plan, requests, scenario, scenario.seconds)
    took_s, after, count = time.perf_counter() - started, _Clocks.read(plan), len(run.times)
    return Figures(
        requests=count,
        rate=count / took_s,
        p50_ms=1e3 * statistics.median(run.times),
        first_ms=1e3 * statistics.median(run.firsts),
        cpu_us=1e6 * (after.server_s - before.server_s) / count,
        busy=(after.worked - before.worked) / max(1, after.passed - before.passed),
        generator=(after.generator_s - before.generator_s) / took_s,
    )


class _Clocks(NamedTuple):
    server_s: float
    generator_s: float
    worked: int  # ticks of the core
    passed: int  # ticks

    @classmethod
    def read(cls, plan: Plan) -> _Clocks:
        return cls(_cpu_of(plan.pid), cpu_s((os.getpid(), plan.upstream)), *_core_times(plan.core))


def _cpu_of(pid: int) -> float:
    """Seconds of processor time of this process and its children."""
    if not pid:
        return 0.0
    return cpu_s((pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))))


def _core_times(core: int) -> tuple[int, int]:
    """Return the clock ticks that a core has worked, and those that have passed (proc(5), /proc/stat)."""
    lines = Path("/proc/stat").read_text().splitlines()
    ticks = [int(word) for word in next(line for line in lines if line.startswith(f"cpu{core} ")).split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


async def main(plan: Plan) -> dict[str, Figures]:
    return {scenario.name: await measure(plan, scenario) for scenario in plan.scenarios}


if __name__ == "__main__":
    print(msgspec.json.encode(uvloop.run(main(msgspec.json.decode(sys.stdin.buffer.read(), type=Plan)))).decode())
