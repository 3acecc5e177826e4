"""Streamed requests of several load profiles at once. The loop is open: slow answers do not lower the rate."""

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

from .bed import Bed
from .client import RequestResult, send
from .figures import quantile

Priority = Literal["interactive", "standard", "bulk"]
GAUGES = ("causeway_gateway_requests_queued", "causeway_gateway_requests_running", "causeway_gateway_concurrency_limit")


class LoadProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One stream of requests: its rate, its callers and what they request."""

    name: str
    per_s: float
    token: str
    devices: tuple[str, ...] = ()  # the devices' tokens, one drawn for each request; none: all requests use `token`
    tier: str = "assistant-large"
    priority: Priority = "interactive"
    tokens: int = 4
    deadline_ms: int = 10_000


async def open_loop(
    session: aiohttp.ClientSession,
    urls: tuple[str, ...],
    profiles: tuple[LoadProfile, ...],
    for_s: float,
    seed: int = 1,
) -> list[RequestResult]:
    """Run the profiles and return all results, in the order in which the requests were sent.

    Arrivals are a Poisson process, for each profile the same under the same `seed` whatever the other profiles are.
    Gateways take turns, or each device keeps to its own.
    """
    results: list[RequestResult] = []

    async def send_one(profile: LoadProfile, url: str, device: int) -> None:
        result = await send(
            session,
            url,
            profile=profile.name,
            tier=profile.tier,
            token=profile.devices[device] if profile.devices else profile.token,
            tokens=profile.tokens,
            priority=profile.priority,
            deadline_ms=profile.deadline_ms,
        )
        result.device = device
        results.append(result)

    async def arrivals(profile: LoadProfile, tasks: asyncio.TaskGroup) -> None:
        rng = random.Random(f"{seed} {profile.name}")
        turns = itertools.cycle(urls)
        at = time.monotonic()
        ends = at + for_s
        while (at := at + rng.expovariate(profile.per_s)) < ends:
            device = rng.randrange(len(profile.devices)) if profile.devices else 0
            url = urls[device % len(urls)] if profile.devices else next(turns)
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            tasks.create_task(send_one(profile, url, device))

    async with asyncio.TaskGroup() as tasks:
        for profile in profiles:
            tasks.create_task(arrivals(profile, tasks))
    return sorted(results, key=lambda each: each.sent_at)


async def closed_loop(
    session: aiohttp.ClientSession, urls: tuple[str, ...], profile: LoadProfile, clients: int, for_s: float
) -> list[RequestResult]:
    """Run `clients` clients, each of which sends its next request as soon as it has its answer."""
    results: list[RequestResult] = []
    turns = itertools.cycle(urls)
    ends = time.monotonic() + for_s

    async def client() -> None:
        url = next(turns)
        while time.monotonic() < ends:
            results.append(
                await send(
                    session,
                    url,
                    profile=profile.name,
                    tier=profile.tier,
                    token=profile.token,
                    tokens=profile.tokens,
                    priority=profile.priority,
                )
            )

    async with asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(client())
    return results


class GaugeSampler:
    """Samples the gateways' gauges `names` once a second while it is entered."""

    def __init__(self, session: aiohttp.ClientSession, bed: Bed, names: tuple[str, ...]) -> None:
        self._session = session
        self._urls = bed.operator_urls
        self._headers = bed.operator_headers
        self._names = names
        self._samples: dict[str, list[float]] = collections.defaultdict(list)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def __str__(self) -> str:
        """Mean and maximum over all gateways, of each gauge that was ever above zero."""
        known = {key: values for key, values in sorted(self._samples.items()) if any(values)}
        return "; ".join(f"{key} {sum(found) / len(found):.1f} to {max(found):.0f}" for key, found in known.items())

    async def _watch(self) -> None:
        while True:
            for url in self._urls:
                async with self._session.get(f"{url}/metrics", headers=self._headers) as reply:
                    self._add(await reply.text())
            await asyncio.sleep(1.0)

    def _add(self, text: str) -> None:
        for name, labels, value in re.findall(r"^(\w+)(\{.*\})? (\S+)$", text, re.MULTILINE):
            if name in self._names:
                self._samples[name.removeprefix("causeway_gateway_") + labels].append(float(value))


def answers(results: list[RequestResult]) -> list[RequestResult]:
    return [each for each in results if each.outcome == "answer"]


def ttft_ms(results: list[RequestResult], share: float) -> float:
    return 1000.0 * quantile((each.ttft_s for each in results if each.ttft_s), share)


def faulty(results: list[RequestResult]) -> list[str]:
    """Describe the requests that are unresolved or invalid."""
    bad = [each for each in results if each.outcome in ("unresolved", "invalid")]
    return [f"{each.profile} {each.outcome}: {each}" for each in bad]


HEADS = (
    "profile", "sent", "answered", "degraded", "rejected", "broken", "other", "ttft p50 ms", "p95", "p99", "errors"
)  # fmt: skip


def row(name: str, results: list[RequestResult]) -> list[object]:
    """Return the table row under HEADS."""
    answered = answers(results)
    counts = {outcome: sum(each.outcome == outcome for each in results) for outcome in ("rejected", "broken")}
    other = len(results) - len(answered) - sum(counts.values())
    codes = sorted({f"{each.status} {each.code}" for each in results if each.outcome == "rejected"})
    figures = [f"{ttft_ms(answered, share):.0f}" for share in (0.5, 0.95, 0.99)]
    degraded = sum(each.degraded for each in answered)
    return [name, len(results), len(answered), degraded, *counts.values(), other, *figures, ", ".join(codes)]
