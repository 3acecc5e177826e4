"""`python -m tests.bench tenants [--workers 4 --backlog 5000]`: two tenants of one tier, and one of them floods it;
once more beside jobs.

The quiet tenant sends a fifth of the tier's capacity throughout. The other tenant does the same at first, then sends
three times the capacity at the same priority, and so on in turns. The quiet tenant's 99th percentiles, to the first
token and of the complete answer, may rise by MAX_RISE, and all its requests are answered.

During a flood the quiet tenant's requests arrive at the same moments as in the calm before, so that its own bursts are
in both. All calms and all floods are taken together, each from its first moment, because of a few hundred requests the
99th percentile is the third worst.
"""

from __future__ import annotations

import argparse
import asyncio

import aiohttp
import msgspec

from tests.bench.rows import Row, checks

from .backlog import Backlog, add_arguments
from .bed import Bed, running_bed
from .client import RequestResult
from .figures import print_figures, table
from .load import GAUGES, HEADS, GaugeSampler, LoadProfile, answers, faulty, open_loop, row, ttft_ms
from .overload import SPEED, TOKENS
from .slow import duration_ms
from .without import add_without

MAX_RISE = 0.2
SETTLE_S = 5.0
_CAPACITY = SPEED.slots / (SPEED.prefill_s + (TOKENS - 1) * SPEED.step_s)


async def measure(bed: Bed, seconds: float, times: float, rounds: int, jobs: int) -> list[str]:
    """Apply the load, once more beside jobs, and return the failed checks."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        failures, p99s = await apply(bed, session, seconds, times, rounds)
        if jobs:
            backlog = Backlog(session, bed, jobs)
            await backlog.submit()
            started = backlog.started
            more, p99s_beside = await apply(bed, session, seconds, times, rounds)
            failures += more + backlog.compare(p99s, p99s_beside, started)
    return failures


async def apply(
    bed: Bed, session: aiohttp.ClientSession, seconds: float, times: float, rounds: int
) -> tuple[list[str], dict[str, float]]:
    """Return the failed checks, and the quiet tenant's p99s to the first token, ms."""
    quiet = LoadProfile(name="quiet", per_s=0.2 * _CAPACITY, token=bed.token("quiet"))
    other = LoadProfile(name="other", per_s=0.2 * _CAPACITY, token=bed.token("loud"))
    flood = msgspec.structs.replace(other, name="flood", per_s=times * _CAPACITY)
    in_calm: list[RequestResult] = []
    in_flood: list[RequestResult] = []
    await open_loop(session, bed.urls, (quiet, other), SETTLE_S)
    for turn in range(1, rounds + 1):
        calm_results = await open_loop(session, bed.urls, (quiet, other), seconds, seed=turn)
        async with GaugeSampler(session, bed, GAUGES) as gauges:
            flood_results = await open_loop(session, bed.urls, (quiet, flood), seconds, seed=turn)
        p99s = [f"{ttft_ms(answers(_of(each, 'quiet')), 0.99):.0f} ms" for each in (calm_results, flood_results)]
        print(f"flood {turn}: the quiet tenant's p99 to the first token {p99s[0]} before, {p99s[1]} during it")
        print(f"gauges of a gateway, mean to maximum: {gauges}")
        in_calm, in_flood = in_calm + calm_results, in_flood + flood_results
        await open_loop(session, bed.urls, (quiet, other), SETTLE_S)
    before, after = (_of(each, "quiet") for each in (in_calm, in_flood))
    rows = {
        "quiet, calm": before,
        "other, calm": _of(in_calm, "other"),
        "quiet, flood": after,
        "flood": _of(in_flood, "flood"),
    }
    heads = (*HEADS, "total p50 ms", "p99")
    print(
        table(
            heads,
            [
                [*row(name, results), *(f"{duration_ms(results, share):.0f}" for share in (0.5, 0.99))]
                for name, results in rows.items()
            ],
        )
    )
    rise = {
        "to the first token": ttft_ms(answers(after), 0.99) / ttft_ms(answers(before), 0.99) - 1.0,
        "of the answer": duration_ms(after, 0.99) / duration_ms(before, 0.99) - 1.0,
    }
    served = len(answers(_of(in_flood, "flood"))) / seconds / rounds
    print_figures(
        {
            "quiet tenant's p99 to the first token, times calm": 1.0 + rise["to the first token"],
            "quiet tenant's p99 of the answer, times calm": 1.0 + rise["of the answer"],
            "answered of capacity": len(answers(in_flood)) / seconds / rounds / _CAPACITY,
        }
    )
    print("the quiet tenant's p99 changed by", {name: f"{share:+.1%}" for name, share in rise.items()})
    print(
        f"answered: {len(answers(in_flood)) / seconds / rounds / _CAPACITY:.2f} of capacity, the flood {served:.1f}/s"
    )
    failures = [f"p99 {name} changed by {share:+.1%}" for name, share in rise.items() if share > MAX_RISE]
    failed = len(after) - len(answers(after))
    failures += faulty(in_calm + in_flood)
    failures += [f"{failed} of the quiet tenant's {len(after)} requests were not answered"] if failed else []
    phases = {"quiet, calm": before, "quiet, flood": after}
    return failures, {name: ttft_ms(answers(results), 0.99) for name, results in phases.items()}


def _of(results: list[RequestResult], profile: str) -> list[RequestResult]:
    return [each for each in results if each.profile == profile]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=40.0, help="duration of each calm and each flood")
    parser.add_argument("--rounds", type=int, default=2, help="number of pairs of a calm and a flood")
    parser.add_argument("--times", type=float, default=3.0, help="the flood, in multiples of the capacity")
    add_without(parser)
    parser.add_argument("--fixed", action="store_true", help="a fixed limit: each gateway has half of the slots")
    add_arguments(parser)


def main(arguments: argparse.Namespace) -> list[Row]:
    tier = {"concurrency": SPEED.slots, "max_queued": 64}
    if arguments.fixed:
        tier |= {"min_concurrency": 0}
    tiers = ("assistant-large", "assistant")
    with running_bed(tiers, speed=SPEED, tier=tier, workers=arguments.workers, without=arguments.without) as bed:
        failures = asyncio.run(measure(bed, arguments.seconds, arguments.times, arguments.rounds, arguments.backlog))
    return checks(failures)
