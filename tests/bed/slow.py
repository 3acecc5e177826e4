"""`python -m tests.bench slow [--workers 4 --backlog 5000]`: of three replicas of a tier, one becomes ten times slower,
beside jobs once more, and later one hangs.

The load is `--load` of the pool's capacity. Times are those of complete answers and to the first token, at the client.
Two of three replicas have to serve half as much again each, so some requests wait that did not before: that part of the
slowdown is due to capacity. It is measured too, with the third replica removed from the configuration before it becomes
slow. Checks:

1. With one replica ten times slower, the 99th percentile is at most MAX_SLOWDOWN times that of the healthy pool.
2. A replica that hangs (SIGSTOP of server and model) is ejected within EJECTED_S of the first missed deadline: no
   request that is sent later fails.
3. When it continues, it gets requests again within RETURN_S.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import Iterator

import aiohttp
import psutil

from tests.bench.rows import Row, checks

from .backlog import Backlog, add_arguments
from .bed import Bed, Replica, ReplicaSpeed, running_bed
from .client import RequestResult
from .figures import print_figures, quantile, table
from .load import GAUGES, HEADS, GaugeSampler, LoadProfile, answers, faulty, open_loop, row, ttft_ms
from .without import add_without

SPEED = ReplicaSpeed(slots=8, prefill_s=0.2, step_s=0.1)
TOKENS = 4
MAX_SLOWDOWN = 1.5
EJECTED_S = 2.0
DEADLINE_MS = 3_000
RETURN_S = 45.0
MIN_REQUESTS = 20
_FACTOR = 10.0
_RETURNED_S = 12.0


def pool_capacity(replicas: int) -> float:
    """Return the pool's capacity in requests a second, by the replicas' speed."""
    return replicas * SPEED.slots / (SPEED.prefill_s + (TOKENS - 1) * SPEED.step_s)


def duration_ms(results: list[RequestResult], share: float) -> float:
    return 1000.0 * quantile((each.ended_at - each.sent_at for each in answers(results)), share)


async def one_slow(
    bed: Bed, session: aiohttp.ClientSession, profile: LoadProfile, seconds: float
) -> tuple[list[str], dict[str, float]]:
    """Slow one replica down. Returns the failed checks, and the p99s to the first token, ms."""
    healthy = await open_loop(session, bed.urls, (profile,), seconds)
    victim = bed.replicas[1]
    bed.serve_from([one for one in bed.replicas if one is not victim])
    two = await open_loop(session, bed.urls, (profile,), seconds, seed=2)
    bed.serve_from(bed.replicas)
    await open_loop(session, bed.urls, (profile,), _RETURNED_S, seed=6)
    before = len(victim.calls())
    victim.set_speed(ReplicaSpeed(SPEED.slots, SPEED.prefill_s * _FACTOR, SPEED.step_s * _FACTOR))
    began = time.monotonic()
    slow = await open_loop(session, bed.urls, (profile,), seconds, seed=2)
    marks = {each.mark for each in slow}
    calls = sum(mark in marks for mark in victim.calls()[before:])
    victim.set_speed(SPEED)
    settled = [each for each in slow if each.sent_at - began >= seconds / 3]
    phases = {"healthy": healthy, "two replicas": two, "one slow": slow, "last two thirds": settled}
    print(
        table(
            (*HEADS, "total p99 ms"),
            [[*row(name, results), f"{duration_ms(results, 0.99):.0f}"] for name, results in phases.items()],
        )
    )
    print(f"the slow replica got {calls / max(1, len(slow)):.1%} of the calls; p99 in multiples of the healthy pool's:")
    ratios = {name: slowdown(results, healthy) for name, results in phases.items() if results is not healthy}
    for name, figures in ratios.items():
        print(f"  {name}: " + ", ".join(f"{what} × {ratio:.2f}" for what, ratio in figures.items()))
    print_figures(
        {f"one slow: p99 {what}, times healthy": ratio for what, ratio in ratios["one slow"].items()}
        | {f"settled: p99 {what}, times healthy": ratio for what, ratio in ratios["last two thirds"].items()}
        | {"calls that the slow replica got": calls / max(1, len(slow))}
    )
    failures = [
        f"the p99 {what} is {ratio:.2f} times the healthy pool's, {ratios['two replicas'][what]:.2f} times without it"
        for what, ratio in ratios["one slow"].items()
        if ratio > MAX_SLOWDOWN
    ]
    failed = sum(each.outcome != "answer" for each in slow)
    failures += faulty(slow) + ([f"{failed} requests failed with one slow replica"] if failed else [])
    return failures, {name: ttft_ms(answers(results), 0.99) for name, results in phases.items()}


def slowdown(results: list[RequestResult], healthy: list[RequestResult]) -> dict[str, float]:
    """Return the p99s in multiples of the healthy pool's."""
    return {
        "of the answer": duration_ms(results, 0.99) / duration_ms(healthy, 0.99),
        "to the first token": ttft_ms(answers(results), 0.99) / ttft_ms(answers(healthy), 0.99),
    }


async def one_hung(bed: Bed, session: aiohttp.ClientSession, profile: LoadProfile, seconds: float) -> list[str]:
    """Stop one replica and return the failed checks."""
    await asyncio.sleep(seconds / 3)  # Until the slow replica has finished its requests.
    victim = bed.replicas[2]
    load = asyncio.ensure_future(open_loop(session, bed.urls, (profile,), seconds, seed=3))
    await asyncio.sleep(seconds / 6)
    stopped = time.monotonic()
    before = len(victim.calls())
    with frozen(victim):
        async with GaugeSampler(session, bed, GAUGES) as gauges:
            results = await load
        after = await open_loop(session, bed.urls, (profile,), 5.0, seed=4)
    print(table(HEADS, [row("one hangs", results), row("5 s more", after)]))
    print(f"gauges of a gateway, mean to maximum, from the stop on: {gauges}")
    failed = [
        each for each in results + after if each.outcome != "answer" and each.sent_at >= stopped - DEADLINE_MS / 1e3
    ]
    failures = faulty(results + after)
    if failed:
        first = min(each.ended_at for each in failed)
        last = max(each.sent_at for each in failed)
        print(
            f"{len(failed)} requests failed, the first {first - stopped:.2f} s after the stop; the last of them was "
            f"sent {last - stopped:.2f} s after it, {last - first:+.2f} s from the first failure"
        )
        if last - first > EJECTED_S:
            failures.append(f"the hung replica was still used {last - first:.1f} s after the first failure")
    else:
        print("no request failed")
    back = asyncio.ensure_future(open_loop(session, bed.urls, (profile,), RETURN_S, seed=5))
    resumed = time.monotonic()
    while len(set(victim.calls()[before:]) - {"-"}) < MIN_REQUESTS and not back.done():
        await asyncio.sleep(0.1)
    print(f"{time.monotonic() - resumed:.1f} s after it continued, the replica had got {MIN_REQUESTS} requests")
    if back.done():
        failures.append("the replica got hardly any requests after it continued")
    back.cancel()
    return failures


@contextlib.contextmanager
def frozen(replica: Replica) -> Iterator[None]:
    """Stop server and model with SIGSTOP, and continue them at the end."""
    processes = [one for one in (replica.server, replica.stub) if one is not None]
    for one in processes:
        one.suspend()
    try:
        yield
    finally:
        for one in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.resume()


async def measure(bed: Bed, seconds: float, load: float, jobs: int) -> list[str]:
    per_s = load * pool_capacity(len(bed.replicas))
    profile = LoadProfile(name="interactive", per_s=per_s, token=bed.token("acme"), deadline_ms=DEADLINE_MS)
    patient = LoadProfile(name="interactive", per_s=per_s, token=bed.token("acme"), deadline_ms=15_000)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await open_loop(session, bed.urls, (patient,), 5.0)
        failures, p99s = await one_slow(bed, session, patient, seconds)
        if jobs:
            await open_loop(session, bed.urls, (patient,), _RETURNED_S, seed=7)
            backlog = Backlog(session, bed, jobs, tokens=TOKENS)
            await backlog.submit()
            started = backlog.started
            more, p99s_beside = await one_slow(bed, session, patient, seconds)
            failures += more + backlog.compare(p99s, p99s_beside, started)
        return failures + await one_hung(bed, session, profile, seconds)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=30.0, help="of each phase")
    add_without(parser)
    parser.add_argument("--load", type=float, default=0.5, help="share of the pool's capacity")
    add_arguments(parser)


def main(arguments: argparse.Namespace) -> list[Row]:
    tier = {"concurrency": SPEED.slots, "max_queued": 64}
    replicas = ("assistant-large",) * 3
    with running_bed(replicas, speed=SPEED, tier=tier, workers=arguments.workers, without=arguments.without) as bed:
        failures = asyncio.run(measure(bed, arguments.seconds, arguments.load, arguments.backlog))
    return checks(failures)
