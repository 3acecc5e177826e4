"""`python -m tests.bench soak [--minutes 10]`: mixed load on the whole stack.

Hits, device answers, cloud answers, handoffs, streams, clients that leave and bad requests, side by side, with an
engine kill and a Triton kill in the middle. At the end it checks that every request had exactly one outcome (the
edge's own counters against what was sent), that no slot is taken (nothing running or waiting), that good answers came
back after each kill, and that memory is flat (the second half's trend).
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.stack import Stack, running

from .rows import Row, checks

COMMANDS = (
    "wake me up at {} am",
    "play song number {}",
    "turn off light {}",
    "set the volume to {}",
    "what is the weather in {} days",
)
QUESTIONS = ("why was card payment {} declined", "how do i say number {} in spanish", "what is my routing number {}")
LONG = (
    "i would like to know, and please take all the time that you need for it since there is no hurry at all today, " * 3
)
FLAT_MB = 4.0  # growth allowed over the second half, for one process


class Tally(msgspec.Struct):
    sent: int = 0
    outcomes: collections.Counter[str] = msgspec.field(default_factory=collections.Counter)
    memory: list[tuple[float, dict[str, float]]] = msgspec.field(default_factory=list)
    started: float = 0.0
    last_good: dict[str, float] = msgspec.field(default_factory=dict)


Ask = Callable[[aiohttp.ClientSession, Tally, Iterator[int]], Awaitable[None]]


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "auto", "messages": [{"role": "user", "content": text}], **more}


async def whole(session: aiohttp.ClientSession, tally: Tally, kind: str, body: dict[str, Any]) -> None:
    tally.sent += 1
    async with session.post("/v1/chat/completions", json=body) as reply:
        await reply.read()
        route = reply.headers.get("x-causeway-route", "none")
        tally.outcomes[f"{kind}: {reply.status} {route}"] += 1
        if reply.status == 200:
            tally.last_good[route] = time.monotonic()


async def hit(session: aiohttp.ClientSession, tally: Tally, numbers: Iterator[int]) -> None:
    await whole(session, tally, "hit", chat(f"play song number {next(numbers) % 5}", temperature=0))


async def edge(session: aiohttp.ClientSession, tally: Tally, numbers: Iterator[int]) -> None:
    await whole(session, tally, "edge", chat(random.choice(COMMANDS).format(next(numbers))))


async def cloud(session: aiohttp.ClientSession, tally: Tally, numbers: Iterator[int]) -> None:
    await whole(session, tally, "cloud", chat(f"{LONG} {next(numbers)}"))


async def handoff(session: aiohttp.ClientSession, tally: Tally, numbers: Iterator[int]) -> None:
    await whole(session, tally, "handoff", chat(random.choice(QUESTIONS).format(next(numbers))))


async def stream(session: aiohttp.ClientSession, tally: Tally, numbers: Iterator[int]) -> None:
    """A stream ends with [DONE], or with an error event: nothing else."""
    text = random.choice([f"{LONG} {next(numbers)}", random.choice(COMMANDS).format(next(numbers))])
    tally.sent += 1
    async with session.post("/v1/chat/completions", json=chat(text, stream=True)) as reply:
        body = await reply.read()
        ended = "done" if body.rstrip().endswith(b"[DONE]") else "error" if b'"error"' in body else "cut"
        tally.outcomes[f"stream: {reply.status} {reply.headers.get('x-causeway-route', 'none')} {ended}"] += 1


async def leave(session: aiohttp.ClientSession, tally: Tally, numbers: Iterator[int]) -> None:
    """A client that goes away after the first bytes."""
    schema = {"type": "array", "items": {"enum": ["a"]}, "minItems": 300}
    more = {
        "stream": True,
        "max_tokens": 1800,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }
    tally.sent += 1
    reply = await session.post("/v1/chat/completions", json=chat(f"turn off light {next(numbers)}", **more))
    await reply.content.readany()
    reply.close()
    tally.outcomes["leave: left"] += 1


async def bad(session: aiohttp.ClientSession, tally: Tally, numbers: Iterator[int]) -> None:
    """Refused before it is a request: counted apart from the sent ones."""
    body = random.choice(
        [b"{", b"[]", b'{"model": "auto"}', b"\xff\xfe", json.dumps(chat("x", temperature=7)).encode()]
    )
    headers = {"content-type": "application/json"}
    async with session.post("/v1/chat/completions", data=body, headers=headers) as reply:
        code = (await reply.json())["error"]["code"]
        tally.outcomes[f"bad: {reply.status} {code}"] += 1
        assert next(numbers) >= 0


MIX: tuple[tuple[Ask, int], ...] = (
    (hit, 30),
    (edge, 25),
    (cloud, 15),
    (handoff, 10),
    (stream, 10),
    (leave, 5),
    (bad, 5),
)


async def worker(session: aiohttp.ClientSession, tally: Tally, numbers: Iterator[int], until: float) -> None:
    asks, weights = zip(*MIX, strict=True)
    while time.monotonic() < until:
        ask = random.choices(asks, weights)[0]
        try:
            await ask(session, tally, numbers)
        except (TimeoutError, aiohttp.ClientError) as error:
            tally.outcomes[f"{ask.__name__}: client saw {type(error).__name__}"] += 1
        await asyncio.sleep(random.uniform(0.0, 0.05))


def memory_mb(stack: Stack) -> dict[str, float]:
    """What each part holds, without the pages of files, which the kernel takes back and reads again as it likes; a
    child by its parent's name and its own.
    """
    found: dict[str, float] = {}
    for name, part in stack.parts.items():
        for process in [psutil.Process(part.popen.pid), *part.descendants()]:
            try:
                found[f"{name}/{process.name()}"] = held_mb(process.pid)
            except (psutil.NoSuchProcess, OSError):
                continue
    return found


def held_mb(pid: int) -> float:
    """RssAnon + RssShmem of proc(5): RSS less RssFile."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(words[1]) for words in lines if words[0] in ("RssAnon:", "RssShmem:")) * 1024 / 1e6


async def watch(stack: Stack, tally: Tally, until: float) -> None:
    while time.monotonic() < until:
        tally.memory.append((time.monotonic() - tally.started, memory_mb(stack)))
        print(f"{tally.memory[-1][0]:5.0f} s  {tally.sent} sent  {_short(tally.memory[-1][1])}", flush=True)
        await asyncio.sleep(min(15.0, max(0.1, until - time.monotonic())))


def _short(memory: dict[str, float]) -> str:
    return "  ".join(f"{name} {mb:.0f} MB" for name, mb in memory.items())


async def faults(stack: Stack, length_s: float) -> None:
    await asyncio.sleep(length_s / 3)
    engine = stack.parts["edge"].descendants()[0]
    print(f"kill -9 engine child {engine.pid}", flush=True)
    engine.kill()
    await asyncio.sleep(length_s / 6)
    server = next(p for p in stack.parts["triton"].descendants() if "tritonserver" in p.name())
    print(f"kill -9 tritonserver {server.pid}", flush=True)
    server.kill()


async def counters(session: aiohttp.ClientSession) -> tuple[float, dict[str, float]]:
    """(requests that have an outcome, gauges of what is at work)."""
    async with session.get("/metrics") as reply:
        families = list(text_string_to_metric_families(await reply.text()))
    samples = [sample for family in families for sample in family.samples]
    outcomes = sum(s.value for s in samples if s.name == "causeway_edge_requests_total")
    at_work = (
        "causeway_edge_requests_running",
        "causeway_edge_requests_queued",
        "causeway_edge_engine_requests_queued",
        "causeway_edge_shared_generations",
    )
    return outcomes, {s.name: s.value for s in samples if s.name in at_work}


async def settled(session: aiohttp.ClientSession, sent: int) -> tuple[float, dict[str, float]]:
    """What the counters say once everything that was cancelled has wound down (bounded)."""
    for _ in range(100):
        outcomes, at_work = await counters(session)
        if outcomes >= sent and not any(at_work.values()):
            break
        await asyncio.sleep(0.1)
    return await counters(session)


def growth_mb(memory: list[tuple[float, dict[str, float]]]) -> dict[str, float]:
    """Last quarter's median less the third quarter's: what a part grew by after it had warmed up. Not the mean: the
    seconds in which a part that was killed starts again are no growth."""
    half = len(memory) // 2
    middle = half + (len(memory) - half) // 2
    names = set().union(*(sizes for _, sizes in memory[middle:]))
    return {name: _usual(memory[middle:], name) - _usual(memory[half:middle], name) for name in sorted(names)}


def _usual(memory: list[tuple[float, dict[str, float]]], name: str) -> float:
    """Over the samples in which that part was running."""
    found = [sizes[name] for _, sizes in memory if sizes.get(name)]
    return statistics.median(found) if found else 0.0


async def load(stack: Stack, minutes: float, workers: int) -> list[str]:
    length_s = minutes * 60
    tally = Tally(started=time.monotonic())
    until = tally.started + length_s
    numbers = itertools.count()
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(stack.edge_url, timeout=timeout) as session:
        before, _ = await counters(session)
        jobs = [worker(session, tally, numbers, until) for _ in range(workers)]
        await asyncio.gather(*jobs, watch(stack, tally, until), faults(stack, length_s))
        outcomes, at_work = await settled(session, tally.sent + int(before))
    for what, count in sorted(tally.outcomes.items()):
        print(f"{count:8d}  {what}")
    grown = growth_mb(tally.memory)
    print(f"{tally.sent} requests sent, {outcomes - before:.0f} outcomes counted; at work now: {at_work}")
    print("growth of the last quarter over the third:", {name: round(mb, 1) for name, mb in grown.items()}, "MB")
    wrong = []
    if outcomes - before != tally.sent:
        wrong.append(f"{tally.sent} sent but {outcomes - before:.0f} outcomes")
    if not at_work or any(at_work.values()):
        wrong.append(f"still at work: {at_work or 'unknown: no gauge found'}")
    if leaky := {name: mb for name, mb in grown.items() if mb > FLAT_MB}:
        wrong.append(f"memory grew: {leaky}")
    if any("cut" in what for what in tally.outcomes):
        wrong.append("a stream ended without [DONE] and without an error event")
    late = time.monotonic() - length_s / 4
    silent = [route for route in ("edge", "cloud", "cache") if tally.last_good.get(route, 0.0) < late]
    return wrong + [f"no good answer from {route} in the last quarter" for route in silent]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--workers", type=int, default=12)


def main(args: argparse.Namespace) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder, running(Path(folder)) as stack:
        wrong = asyncio.run(load(stack, args.minutes, args.workers))
    return checks(wrong)
