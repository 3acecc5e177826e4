"""`python -m tests.bench scale [--seconds 20]`: a tier gets 1, 2 and 4 endpoints and back, while clients keep it full.

Clients are a quarter more than the endpoints' slots, each of which sends its next request as soon as it has its answer,
without a pause while the endpoints change: as an autoscaler adds them after the load has come, and removes them after
it has gone. Every endpoint is a paced replica behind real Triton, so its service times are slept and not computed.
Checks:

1. The goodput of 2 endpoints is at least MIN_GAIN[2] times that of one, that of 4 MIN_GAIN[4] times.
2. On the way back down the goodput is that of the way up, within a tenth.
3. No request fails, at any time.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import itertools
import math
import time

import aiohttp

from tests.bench.rows import Row, checks

from .bed import Bed, ReplicaSpeed, running_bed
from .client import RequestResult
from .figures import table
from .load import HEADS, LoadProfile, answers, closed_loop, faulty, row

SPEED = ReplicaSpeed(slots=8, prefill_s=0.4, step_s=0.2)
TOKENS = 4
STAGES = (1, 2, 4, 2, 1)
MIN_GAIN = {2: 1.9, 4: 3.6}
SETTLE_S = 10.0
_CLIENTS = 1.25  # times the slots
_REACHED = 0.9


class Stage:
    """The answers while the tier had so many endpoints."""

    def __init__(self, endpoints: int, results: list[RequestResult], changed: float, ends: float) -> None:
        self.endpoints = endpoints
        self.results = results
        self.changed = changed
        self._ended = [each.ended_at - changed for each in answers(results)]
        self._span_s = ends - changed - SETTLE_S
        self.goodput = sum(SETTLE_S <= at < ends - changed for at in self._ended) / self._span_s

    @property
    def reached_s(self) -> float:
        """Seconds after the change from which on a second had nearly all of the stage's goodput."""
        by_second = collections.Counter(int(at) for at in self._ended)
        seconds = range(int(SETTLE_S + self._span_s))
        return next((at for at in seconds if by_second[at] >= _REACHED * self.goodput), math.inf)


async def measure(bed: Bed, seconds: float) -> list[str]:
    """Run the stages and return the failed checks."""
    profile = LoadProfile(name="interactive", per_s=0.0, token=bed.token("acme"), tokens=TOKENS)
    stages: list[Stage] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await closed_loop(session, bed.urls, profile, 4, 3.0)
        for before, endpoints in itertools.pairwise((1, *STAGES)):
            clients = math.ceil(_CLIENTS * SPEED.slots * endpoints)
            changed = time.monotonic()
            if endpoints > before:
                bed.serve_from(bed.replicas[:endpoints])
            load = asyncio.ensure_future(closed_loop(session, bed.urls, profile, clients, SETTLE_S + seconds))
            if endpoints < before:
                # The load goes first, as it does before an autoscaler removes endpoints.
                await asyncio.sleep(1.0)
                bed.serve_from(bed.replicas[:endpoints])
            stages.append(Stage(endpoints, await load, changed, changed + SETTLE_S + seconds))
    return check(bed, stages)


def check(bed: Bed, stages: list[Stage]) -> list[str]:
    print(table(HEADS, [row(f"{stage.endpoints} endpoints", stage.results) for stage in stages]))
    one = stages[0].goodput
    up = {stage.endpoints: stage.goodput for stage in reversed(stages[: len(STAGES) // 2 + 1])}
    print("goodput:", ", ".join(f"{stage.endpoints}: {stage.goodput:.1f}/s" for stage in stages))
    print("in multiples of one endpoint's:", ", ".join(f"{stage.goodput / one:.2f}" for stage in stages))
    print("nearly all of it after, s:", ", ".join(f"{stage.reached_s:.0f}" for stage in stages))
    peaks = [replica.peak for replica in bed.replicas]
    print(f"most sequences inside an endpoint at once: {peaks}, of {SPEED.slots}")
    failed = [each for stage in stages for each in stage.results if each.outcome != "answer"]
    failures = [
        f"{count} endpoints have {up[count] / one:.2f} times the goodput of one"
        for count, least in MIN_GAIN.items()
        if up[count] < least * one
    ]
    failures += [
        f"back at {stage.endpoints} endpoints the goodput is {stage.goodput:.1f}/s"
        for stage in stages[len(STAGES) // 2 + 1 :]
        if abs(stage.goodput - up[stage.endpoints]) > 0.1 * up[stage.endpoints]
    ]
    failures += [f"{len(failed)} requests were not answered, the first: {each}" for each in failed[:1]]
    return failures + faulty([each for stage in stages for each in stage.results])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=20.0, help="of each stage, after it has settled")


def main(arguments: argparse.Namespace) -> list[Row]:
    # Patient: the load comes before the endpoints, and nothing may be shed for it.
    tier = {"concurrency": SPEED.slots, "max_queued": 64, "ttft_objective_s": 10.0}
    replicas = ("assistant-large",) * max(STAGES)
    with running_bed(replicas, speed=SPEED, tier=tier, workers=0, serving=1) as bed:
        failures = asyncio.run(measure(bed, arguments.seconds))
    return checks(failures)
