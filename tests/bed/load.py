"""Streams at a rate, of several kinds at once, until a time: open loop, so that a slow answer holds nobody back."""

from __future__ import annotations

import asyncio
import collections
import itertools
import random
import re
import time
from typing import Literal, Self

import aiohttp
import msgspec

from .asking import Told, ask
from .figures import quantile

Priority = Literal["interactive", "standard", "bulk"]


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks, how often, and for what."""

    name: str
    per_s: float
    token: str
    devices: tuple[str, ...] = ()  # tokens of those who ask, drawn for each request; none: all ask with `token`
    tier: str = "assistant-large"
    priority: Priority = "interactive"
    tokens: int = 4
    deadline_ms: int = 10_000


async def loaded(
    session: aiohttp.ClientSession, urls: tuple[str, ...], kinds: tuple[Kind, ...], for_s: float, seed: int = 1
) -> list[Told]:
    """Every request's outcome, in the order in which they were asked. Arrivals are Poisson's, of each kind the same
    under the same `seed` whoever else asks; its gateways take turns, or each device keeps to its own."""
    told: list[Told] = []

    async def one(kind: Kind, url: str, device: int) -> None:
        found = await ask(
            session,
            url,
            kind=kind.name,
            tier=kind.tier,
            token=kind.devices[device] if kind.devices else kind.token,
            tokens=kind.tokens,
            priority=kind.priority,
            deadline_ms=kind.deadline_ms,
        )
        found.device = device
        told.append(found)

    async def arrivals(kind: Kind, tasks: asyncio.TaskGroup) -> None:
        rng = random.Random(f"{seed} {kind.name}")
        turns = itertools.cycle(urls)
        at = time.monotonic()
        ends = at + for_s
        while (at := at + rng.expovariate(kind.per_s)) < ends:
            device = rng.randrange(len(kind.devices)) if kind.devices else 0
            url = urls[device % len(urls)] if kind.devices else next(turns)
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            tasks.create_task(one(kind, url, device))

    async with asyncio.TaskGroup() as tasks:
        for kind in kinds:
            tasks.create_task(arrivals(kind, tasks))
    return sorted(told, key=lambda each: each.asked_at)


async def closed(
    session: aiohttp.ClientSession, urls: tuple[str, ...], kind: Kind, clients: int, for_s: float
) -> list[Told]:
    """So many clients, each asking again as soon as it has its answer."""
    told: list[Told] = []
    turns = itertools.cycle(urls)
    ends = time.monotonic() + for_s

    async def client() -> None:
        url = next(turns)
        while time.monotonic() < ends:
            told.append(
                await ask(
                    session,
                    url,
                    kind=kind.name,
                    tier=kind.tier,
                    token=kind.token,
                    tokens=kind.tokens,
                    priority=kind.priority,
                )
            )

    async with asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(client())
    return told


class Gauges:
    """The gateways' gauges `names`, looked at once a second while it is entered."""

    def __init__(self, session: aiohttp.ClientSession, urls: tuple[str, ...], names: tuple[str, ...]) -> None:
        self._session = session
        self._urls = urls
        self._names = names
        self._seen: dict[str, list[float]] = collections.defaultdict(list)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def __str__(self) -> str:
        """Mean and most of each that was ever more than nothing, over all gateways."""
        told = {
            key: (sum(values) / len(values), max(values)) for key, values in sorted(self._seen.items()) if any(values)
        }
        return "; ".join(f"{key} {mean:.1f} to {most:.0f}" for key, (mean, most) in told.items())

    async def _watch(self) -> None:
        while True:
            for url in self._urls:
                async with self._session.get(f"{url}/metrics") as reply:
                    self._take(await reply.text())
            await asyncio.sleep(1.0)

    def _take(self, text: str) -> None:
        for name, labels, value in re.findall(r"^(\w+)(\{.*\})? (\S+)$", text, re.MULTILINE):
            if name in self._names:
                self._seen[name.removeprefix("causeway_cloud_") + labels].append(float(value))


GAUGES = ("causeway_cloud_requests_queued", "causeway_cloud_requests_running", "causeway_cloud_concurrency_limit")


def good(told: list[Told]) -> list[Told]:
    return [each for each in told if each.outcome == "answer"]


def ttft_ms(told: list[Told], share: float) -> float:
    return 1000.0 * quantile((each.ttft_s for each in told if each.ttft_s), share)


def odd(told: list[Told]) -> list[str]:
    """Those without an outcome, or with a false one."""
    return [f"{each.kind} {each.outcome}: {each}" for each in told if each.outcome in ("none", "false")]


HEADS = ("kind", "asked", "answer", "degraded", "refused", "broken", "other", "ttft p50 ms", "p95", "p99", "refused as")


def row(name: str, told: list[Told]) -> list[object]:
    """Under HEADS."""
    answers = good(told)
    counts = {outcome: sum(each.outcome == outcome for each in told) for outcome in ("refused", "broken")}
    other = len(told) - len(answers) - sum(counts.values())
    codes = sorted({f"{each.status} {each.code}" for each in told if each.outcome == "refused"})
    figures = [f"{ttft_ms(answers, share):.0f}" for share in (0.5, 0.95, 0.99)]
    degraded = sum(each.degraded for each in answers)
    return [name, len(told), len(answers), degraded, *counts.values(), other, *figures, ", ".join(codes)]
