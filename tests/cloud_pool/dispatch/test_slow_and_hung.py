"""Two gateways before three replicas, of which one becomes ten times slower, and another one hangs. In virtual time,
with the real parts of the gateways."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from tests.virtual_time import run_in_virtual_time

from .simulated import PREFILL_S, SLOTS, STEP_S, TOKENS, Gateway, RequestResult, Server, open_loop, quantile, watched

pytestmark = pytest.mark.slow

T = TypeVar("T")
CAPACITY = 3 * SLOTS / (PREFILL_S + (TOKENS - 1) * STEP_S)  # requests a second
SLOW = 10.0


class Bed:
    """A dispatcher over endpoints a, b, c …, one for each list of scripts."""

    def __init__(self, clock: Callable[[], float], seed: int, load: float) -> None:
        self.clock = clock
        self.chance = random.Random(seed)
        self.servers = [Server() for _ in range(3)]
        self.gateways = [Gateway(self.servers, clock, self.chance) for _ in range(2)]
        self._per_s = load * CAPACITY

    async def open_loop(
        self, seconds: float, *, deadline_s: float = 15.0, prompts: tuple[str, ...] = ("p",)
    ) -> list[RequestResult]:
        return await open_loop(
            self.gateways, self.clock, self.chance, self._per_s, seconds, deadline_s=deadline_s, prompts=prompts
        )


def simulated(play: Callable[[Bed], Awaitable[T]], seed: int, load: float) -> T:
    async def main(clock: Callable[[], float]) -> T:
        bed = Bed(clock, seed, load)
        async with watched(bed.gateways):
            await bed.open_loop(10.0)
            return await play(bed)

    return run_in_virtual_time(main)


def p99(results: list[RequestResult]) -> float:
    return quantile([one.took_s for one in results], 0.99)


@pytest.mark.parametrize("seed", range(4))
def test_one_slow_replica_costs_little(seed: int) -> None:
    """With room on the others the p99 of answers stays within 1.5 times the healthy pool's, from the first moment
    on."""

    async def play(bed: Bed) -> None:
        healthy = await bed.open_loop(30.0)
        bed.servers[1].slow_down(SLOW)
        before = bed.servers[1].calls
        slow = await bed.open_loop(30.0)
        assert not [one.error for one in slow if one.error]
        assert p99(slow) <= 1.5 * p99(healthy)
        assert bed.servers[1].calls - before <= 0.015 * len(slow)
        assert [one.endpoint for one in slow[len(slow) // 3 :]].count("t1:1") == 0

    simulated(play, seed, load=1 / 3)


def test_a_recovered_replica_gets_its_share_back() -> None:
    async def play(bed: Bed) -> None:
        bed.servers[1].slow_down(SLOW)
        await bed.open_loop(30.0)
        bed.servers[1].slow_down(1.0)
        await bed.open_loop(15.0)
        later = await bed.open_loop(20.0)
        assert [one.endpoint for one in later].count("t1:1") > 0.25 * len(later)

    simulated(play, 1, load=0.5)


def test_a_replica_slow_for_requests_only_is_used_less_after_each_relapse() -> None:
    async def play(bed: Bed) -> None:
        healthy = await bed.open_loop(60.0)
        bed.servers[1].slow_down(SLOW, probes=1.0)
        sent = []
        for _ in range(3):
            before = bed.servers[1].calls
            slow = await bed.open_loop(60.0)
            sent.append((bed.servers[1].calls - before) / len(slow))
        assert sent[0] > sent[1] > sent[2]
        assert sent[1] <= 0.015
        assert p99(slow) <= 1.5 * p99(healthy)

    simulated(play, 1, load=0.25)


@pytest.mark.parametrize("long_share", [0.05, 0.2])
def test_mixed_prompts_do_not_exclude_any_endpoint(long_share: float) -> None:
    prompts = ("p" * 10, *["p"] * round(1 / long_share - 1))

    async def play(bed: Bed) -> None:
        await bed.open_loop(60.0, prompts=prompts)
        for server in bed.servers:
            assert abs(server.calls / sum(one.calls for one in bed.servers) - 1 / 3) < 0.06

    simulated(play, 1, load=0.2)


def test_a_hung_replica_gets_no_requests_after_two_seconds() -> None:
    async def play(bed: Bed) -> None:
        running = asyncio.ensure_future(bed.open_loop(25.0, deadline_s=3.0))
        await asyncio.sleep(5.0)
        stopped = bed.clock()
        bed.servers[2].stop()
        results = await running
        assert all(one.sent_at < stopped for one in results if one.error), "no request was sent there in vain"
        assert sum(bool(one.error) for one in results) <= SLOTS

    simulated(play, 2, load=0.5)


@pytest.mark.parametrize("slow_for_s", [30.0, 45.0, 60.0])
def test_a_recovered_replica_is_back_when_another_one_hangs(slow_for_s: float) -> None:
    """A third of the pool cannot carry what two thirds can."""

    async def play(bed: Bed) -> None:
        bed.servers[1].slow_down(SLOW)
        await bed.open_loop(slow_for_s)
        bed.servers[1].slow_down(1.0)
        await asyncio.sleep(10.0)
        running = asyncio.ensure_future(bed.open_loop(25.0, deadline_s=3.0))
        await asyncio.sleep(5.0)
        stopped = bed.clock()
        bed.servers[2].stop()
        failed = [one for one in await running if one.error and one.took_s + one.sent_at >= stopped]
        assert max((one.sent_at - stopped for one in failed), default=0.0) <= 2.0
        assert len(failed) <= SLOTS

    simulated(play, 1, load=0.5)
