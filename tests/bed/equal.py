"""`python -m tests.bench equal`: equal requests at two gateways with a shared cache.

A streamed request goes to one gateway and 50 ms later to the other, eight different ones at a time. The second client
should get its tokens while the first one does, and no model should be called twice. Figures by round: the second's time
to the first token over the first's, its time to the end of the answer likewise, and calls per pair.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time

import aiohttp

from tests.bench.rows import Row

from .bed import Bed, ReplicaSpeed, running_bed
from .client import body_of, new_mark
from .figures import print_figures
from .without import add_without

SPEED = ReplicaSpeed(slots=16, prefill_s=0.2, step_s=0.05)
TOKENS = 24
PAIRS = 8
_LATER_S = 0.05
_PAUSE_S = 0.5


async def ask(session: aiohttp.ClientSession, url: str, token: str, mark: str, after_s: float) -> tuple[float, float]:
    """Return the times to the first token and to the end, s. Raises RuntimeError where it is no whole answer."""
    await asyncio.sleep(after_s)
    began = time.monotonic()
    first_s, text = 0.0, ""
    body = body_of(mark, "assistant-large", TOKENS) | {"temperature": 0}
    headers = {"authorization": f"Bearer {token}", "x-causeway-priority": "interactive"}
    async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as reply:
        async for line in reply.content:
            if not line.startswith(b"data: {"):
                continue
            for choice in json.loads(line[5:])["choices"]:
                text += choice["delta"].get("content") or ""
                first_s = first_s or (time.monotonic() - began if text else 0.0)
    if text.count("word") != TOKENS:
        raise RuntimeError(f"{url} answered {reply.status} {text!r}")
    return first_s, time.monotonic() - began


async def measure(bed: Bed, rounds: int) -> None:
    token = bed.token("acme")
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for number in range(rounds + 1):
            before = len(calls_of(bed))
            marks = [new_mark() for _ in range(PAIRS)]
            firsts = [ask(session, bed.urls[at % 2], token, mark, 0.0) for at, mark in enumerate(marks)]
            seconds = [ask(session, bed.urls[1 - at % 2], token, mark, _LATER_S) for at, mark in enumerate(marks)]
            times = await asyncio.gather(*firsts, *seconds)
            await asyncio.sleep(_PAUSE_S)
            leaders, followers = times[:PAIRS], times[PAIRS:]
            figures = {
                f"second's time {name}, times the first's": statistics.median(
                    mine[at] / other[at] for mine, other in zip(followers, leaders, strict=True)
                )
                for at, name in enumerate(("to the first token", "of the answer"))
            }
            if number:  # The first one warms up.
                print_figures(figures | {"calls per pair": (len(calls_of(bed)) - before) / PAIRS})


def calls_of(bed: Bed) -> list[str]:
    """Return the marks of all calls but the gateways' probes."""
    return [mark for mark in bed.replicas[0].calls() if mark != "-"]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5)
    add_without(parser)


def main(arguments: argparse.Namespace) -> list[Row]:
    with running_bed(
        ("assistant-large",),
        speed=SPEED,
        tier={"concurrency": SPEED.slots},
        config={"cache": {"enabled": True}},
        workers=0,
        without=arguments.without,
    ) as bed:
        asyncio.run(measure(bed, arguments.rounds))
    return []
