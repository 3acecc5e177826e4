"""`python -m tests.bed.slow`: of three replicas of a tier, one becomes ten times slower, and later one hangs.

The load is `--load` of what the pool can do. Times are of whole answers and to the first token, at the client. Two of
three replicas have to do half as much again each, and then requests wait that did not: so much of it is capacity's, and
nobody's choice. It is measured too, with the third replica taken out of the configuration before it becomes slow.

1. with one replica ten times slower, the 99th percentile is at most SLOWER times the healthy pool's
2. a replica that hangs (SIGSTOP of server and model) is ejected within EJECTED_S of the first deadline that passed:
   none of the requests that were asked later fails
3. when it goes on, it is used again within BACK_S
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time

import aiohttp
import psutil

from .asking import Told
from .bed import Bed, Pace, Replica, has_endpoints, standing
from .figures import quantile, table
from .load import GAUGES, HEADS, Gauges, Kind, good, loaded, odd, row, ttft_ms

PACE = Pace(slots=8, prefill_s=0.2, step_s=0.1)
TOKENS = 4
SLOWER = 1.5
EJECTED_S = 2.0
DEADLINE_MS = 3_000
BACK_S = 45.0
USED = 20
_FACTOR = 10.0
_SLOW_START_S = 12.0


def pool_capacity(replicas: int) -> float:
    """Requests a second, by the replicas' clocks."""
    return replicas * PACE.slots / (PACE.prefill_s + (TOKENS - 1) * PACE.step_s)


def took_ms(told: list[Told], share: float) -> float:
    return 1000.0 * quantile((each.ended_at - each.asked_at for each in good(told)), share)


async def one_slow(bed: Bed, session: aiohttp.ClientSession, kind: Kind, seconds: float) -> list[str]:
    """What was wrong."""
    healthy = await loaded(session, bed.urls, (kind,), seconds)
    victim = bed.replicas[1]
    bed.serve_from([one for one in bed.replicas if one is not victim])
    two = await loaded(session, bed.urls, (kind,), seconds, seed=2)
    bed.serve_from(bed.replicas)
    await loaded(session, bed.urls, (kind,), _SLOW_START_S, seed=6)
    before = len(victim.calls())
    victim.pace(Pace(PACE.slots, PACE.prefill_s * _FACTOR, PACE.step_s * _FACTOR))
    began = time.monotonic()
    slow = await loaded(session, bed.urls, (kind,), seconds, seed=2)
    calls = sum(mark != "-" for mark in victim.calls()[before:])
    victim.pace(PACE)
    settled = [told for told in slow if told.asked_at - began >= seconds / 3]
    phases = {"healthy": healthy, "without one": two, "one slow": slow, "its last two thirds": settled}
    print(
        table(
            (*HEADS, "took p99 ms"), [[*row(name, told), f"{took_ms(told, 0.99):.0f}"] for name, told in phases.items()]
        )
    )
    print(f"the slow replica got {calls / max(1, len(slow)):.1%} of the calls; times the healthy pool's p99:")
    ratios = {name: of_healthy(told, healthy) for name, told in phases.items() if told is not healthy}
    for name, found in ratios.items():
        print(f"  {name}: " + ", ".join(f"{what} × {ratio:.2f}" for what, ratio in found.items()))
    wrong = [
        f"the p99 {what} is {ratio:.2f} times the healthy pool's, {ratios['without one'][what]:.2f} times without it"
        for what, ratio in ratios["one slow"].items()
        if ratio > SLOWER
    ]
    failed = sum(told.outcome != "answer" for told in slow)
    return wrong + odd(slow) + ([f"{failed} requests failed with one slow replica"] if failed else [])


def of_healthy(told: list[Told], healthy: list[Told]) -> dict[str, float]:
    """p99s, as times the healthy pool's."""
    return {
        "of the answer": took_ms(told, 0.99) / took_ms(healthy, 0.99),
        "to the first token": ttft_ms(good(told), 0.99) / ttft_ms(good(healthy), 0.99),
    }


async def one_hung(bed: Bed, session: aiohttp.ClientSession, kind: Kind, seconds: float) -> list[str]:
    """What was wrong."""
    await asyncio.sleep(seconds / 3)  # what the slow one still held has ended
    victim = bed.replicas[2]
    load = asyncio.ensure_future(loaded(session, bed.urls, (kind,), seconds, seed=3))
    await asyncio.sleep(seconds / 6)
    stopped = time.monotonic()
    before = len(victim.calls())
    with frozen(victim):
        async with Gauges(session, bed.urls, GAUGES) as gauges:
            told = await load
        after = await loaded(session, bed.urls, (kind,), 5.0, seed=4)
    print(table(HEADS, [row("one hangs", told), row("5 s more", after)]))
    print(f"gauges of a gateway, mean to most, from the stop on: {gauges}")
    failed = [
        each for each in told + after if each.outcome != "answer" and each.asked_at >= stopped - DEADLINE_MS / 1e3
    ]
    wrong = odd(told + after)
    if failed:
        first = min(each.ended_at for each in failed)
        last = max(each.asked_at for each in failed)
        print(
            f"{len(failed)} requests failed, the first {first - stopped:.2f} s after the stop; the last of them was "
            f"asked {last - stopped:.2f} s after it, {last - first:+.2f} s from the first failure"
        )
        if last - first > EJECTED_S:
            wrong.append(f"the hung replica was still used {last - first:.1f} s after the first failure")
    else:
        print("no request failed")
    back = asyncio.ensure_future(loaded(session, bed.urls, (kind,), BACK_S, seed=5))
    resumed = time.monotonic()
    while len(set(victim.calls()[before:]) - {"-"}) < USED and not back.done():
        await asyncio.sleep(0.1)
    print(f"{time.monotonic() - resumed:.1f} s after it went on, the replica had had {USED} requests")
    if back.done():
        wrong.append("the replica that went on was hardly used again")
    back.cancel()
    return wrong


@contextlib.contextmanager
def frozen(replica: Replica):  # type: ignore[no-untyped-def]
    """SIGSTOP of server and model; SIGCONT at the end."""
    processes = [one for one in (replica.server, replica.stub) if one is not None]
    for one in processes:
        one.suspend()
    try:
        yield
    finally:
        for one in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.resume()


async def measured(bed: Bed, seconds: float, load: float) -> list[str]:
    per_s = load * pool_capacity(len(bed.replicas))
    kind = Kind(name="interactive", per_s=per_s, token=bed.token("acme"), deadline_ms=DEADLINE_MS)
    patient = Kind(name="interactive", per_s=per_s, token=bed.token("acme"), deadline_ms=15_000)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await loaded(session, bed.urls, (patient,), 5.0)
        wrong = await one_slow(bed, session, patient, seconds)
        return wrong + await one_hung(bed, session, kind, seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each phase")
    parser.add_argument("--load", type=float, default=0.5, help="share of what the pool can do")
    told = parser.parse_args()
    if not has_endpoints():
        print("a tier has one replica only: there is nothing to measure")
        return 2
    tier = {"concurrency": 24, "max_queued": 64}
    with standing(("assistant-large",) * 3, pace=PACE, tier=tier, workers=0) as bed:
        wrong = asyncio.run(measured(bed, told.seconds, told.load))
    for what in wrong:
        print(f"WRONG: {what}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
