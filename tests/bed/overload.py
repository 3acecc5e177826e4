"""`python -m tests.bench overload [--seconds 60] [--times 3] [--workers 4 --backlog 5000]`: a tier gets three times the
load that it can serve, and once more beside jobs.

Of the tiers `assistant-large` and `assistant`, both paced, all requests name the first. Interactive and standard
requests together are its capacity; bulk requests are the rest. First the capacity is measured with as many clients as
the replica has slots, and the time to first token without load. Checks during the load and after it:

1. Goodput is at least MIN_GOODPUT of the capacity.
2. The 99th percentile of the interactive requests' time to first token is at most MAX_SLOWDOWN times the unloaded one;
   beside jobs `backlog.MAX_SLOWDOWN` times that without jobs.
3. Bulk requests are rejected more often than standard ones, and those more often than interactive ones.
4. Queues and memory are bounded.
5. Everything is as before within RECOVERY_S of the end.
6. Tiers do not flap.

When only a part of the work fits, it is divided between the tiers, and which tier gives most of a second's answers is
then chance: at a constant share of one half it changes thirty times a minute, and two thirds of a second's sixteen
answers come from one tier, later from the other, six times a minute. Both figures are printed but not checked. Checked
are two others. An operator sees a profile change sides: two thirds of SIDES_WINDOW_S's answers from one tier, later two
thirds from the other (limit SIDES_PER_MINUTE; by chance that is one window in a thousand). A user sees a device
answered by another tier than the time before (limit FLAPS_PER_MINUTE; with a random tier for each request that would be
every other time); this is the mean over the devices. For
bulk only the sides are checked: it gets the room that there is anywhere, and would be rejected otherwise. Each device
uses one gateway here, as its connection does.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import itertools
import math
import time

import aiohttp
import msgspec

from tests.bench.rows import Row, checks

from .backlog import Backlog, add_arguments
from .bed import Bed, ReplicaSpeed, running_bed
from .client import RequestResult
from .figures import print_figures, quantile, table
from .load import GAUGES, HEADS, GaugeSampler, LoadProfile, answers, closed_loop, faulty, open_loop, row, ttft_ms
from .without import add_without

TIERS = ("assistant-large", "assistant")
SPEED = ReplicaSpeed(slots=16, prefill_s=0.2, step_s=0.1)
TOKENS = 4
MIN_GOODPUT = 0.9
MAX_SLOWDOWN = 2.0
RECOVERY_S = 5.0
MAX_GROWTH_MB = 15.0
FLAPS_PER_MINUTE = 6.0
SIDES_PER_MINUTE = 3.0
SIDES_WINDOW_S = 5
DEVICES = 40
SIDES = 2.0 / 3.0
SETTLE_S = 10.0


async def measure(bed: Bed, seconds: float, times: float, jobs: int) -> list[str]:
    """Apply the load and return the failed checks."""
    token = bed.token("acme")
    devices = tuple(bed.token("acme", f"kiosk-{number}") for number in range(DEVICES))
    interactive = LoadProfile(name="interactive", per_s=4.0, token=token, devices=devices)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await closed_loop(session, bed.urls, interactive, 4, 2.0)
        unloaded = await open_loop(session, bed.urls, (interactive,), SETTLE_S)
        began = time.monotonic()
        full = await closed_loop(session, bed.urls, interactive, SPEED.slots, SETTLE_S)
        capacity = len(answers(full)) / (max(result.ended_at for result in full) - began)
        expected = SPEED.slots / (SPEED.prefill_s + (TOKENS - 1) * SPEED.step_s)
        print(f"capacity {capacity:.1f} requests/s with {SPEED.slots} clients; {expected:.1f} by the replica's speed")
        profiles = (
            msgspec.structs.replace(interactive, per_s=0.5 * capacity),
            msgspec.structs.replace(interactive, name="standard", per_s=0.5 * capacity, priority="standard"),
            msgspec.structs.replace(interactive, name="bulk", per_s=(times - 1.0) * capacity, priority="bulk"),
        )
        run = Overload(bed, session, interactive, profiles, capacity, unloaded)
        failures, p99 = await run.apply(seconds)
        if jobs:
            backlog = Backlog(session, bed, jobs)
            await backlog.submit()
            started = backlog.started
            more, p99_beside = await run.apply(seconds, beside_jobs=True)
            failures += more + backlog.compare(p99, p99_beside, started)
    return failures


class Overload:
    """The load and what it is compared with."""

    def __init__(
        self,
        bed: Bed,
        session: aiohttp.ClientSession,
        interactive: LoadProfile,
        profiles: tuple[LoadProfile, ...],
        capacity: float,
        unloaded: list[RequestResult],
    ) -> None:
        self._bed = bed
        self._session = session
        self._interactive = interactive
        self._profiles = profiles
        self._capacity = capacity
        self._unloaded = unloaded

    async def apply(self, seconds: float, *, beside_jobs: bool = False) -> tuple[list[str], dict[str, float]]:
        """Return the failed checks, and the interactive p99 to the first token, ms."""
        bed, session = self._bed, self._session
        async with GaugeSampler(session, bed, GAUGES) as gauges:
            load = asyncio.ensure_future(open_loop(session, bed.urls, self._profiles, seconds))
            await asyncio.sleep(min(SETTLE_S, seconds / 3))
            before = bed.memory_mb()
            start = time.monotonic()
            await asyncio.sleep(seconds - min(SETTLE_S, seconds / 3))
            stop = time.monotonic()
            after = bed.memory_mb()
        recovering = asyncio.ensure_future(open_loop(session, bed.urls, (self._interactive,), 2 * SETTLE_S))
        under = await load
        calm = await recovering
        p99 = ttft_ms(answers([each for each in under if each.profile == "interactive"]), 0.99)
        slowest = math.inf if beside_jobs else MAX_SLOWDOWN
        failures = check(self._capacity, self._unloaded, under, calm, (start, stop), gauges, before, after, slowest)
        return failures, {"interactive": p99}


def check(
    capacity: float,
    unloaded: list[RequestResult],
    under: list[RequestResult],
    calm: list[RequestResult],
    span: tuple[float, float],
    gauges: GaugeSampler,
    before: dict[str, float],
    after: dict[str, float],
    slowest: float,
) -> list[str]:
    names = ("interactive", "standard", "bulk")
    by_profile = {name: [each for each in under if each.profile == name] for name in names}
    rows = [
        row("unloaded", unloaded),
        *(row(name, results) for name, results in by_profile.items()),
        row("after", calm),
    ]
    print(table(HEADS, rows))
    start, stop = span
    ended = [each for each in answers(under) if start <= each.ended_at < stop]
    goodput = len(ended) / (stop - start)
    tiers = collections.Counter(each.tier for each in ended)
    base, loaded_ms = ttft_ms(answers(unloaded), 0.99), ttft_ms(answers(by_profile["interactive"]), 0.99)
    minutes = (stop - start) / 60.0
    flaps = {
        name: (
            side_changes(results, start, stop) / minutes,
            device_changes(results, start, stop) / minutes,
            majority_changes(results, start, stop) / minutes,
            side_changes(results, start, stop, window_s=1) / minutes,
            sum(start <= each.sent_at < stop for each in answers(results)) / DEVICES / minutes,
        )
        for name, results in by_profile.items()
    }
    grown = {name: after[name] - before[name] for name in before if name.startswith("gateway")}
    recovered = recovery_s(calm, stop, 1.5 * base / 1000.0)
    rejected = {
        name: sum(each.outcome != "answer" for each in results) / len(results) for name, results in by_profile.items()
    }
    print_figures(
        {
            "goodput of capacity": goodput / capacity,
            "interactive p99 to the first token, times unloaded": loaded_ms / base,
            "standard p99 to the first token, times unloaded": ttft_ms(answers(by_profile["standard"]), 0.99) / base,
            "bulk not answered": rejected["bulk"],
            "changes of a standard device a minute": flaps["standard"][1],
            "sides of standard a minute": flaps["standard"][0],
        }
    )
    print(f"goodput {goodput:.1f}/s = {goodput / capacity:.2f} of capacity, by tier {dict(tiers)}")
    print(f"interactive p99 ttft {loaded_ms:.0f} ms = {loaded_ms / base:.2f} times the unloaded {base:.0f} ms")
    print("not answered:", {name: f"{share:.1%}" for name, share in rejected.items()})
    print(f"gauges of a gateway, mean to maximum: {gauges}")
    print("gateways grew, MB:", {name: round(mb, 1) for name, mb in grown.items()})
    print(f"recovered {recovered:.1f} s after the end")
    heads = ("tier changes a minute", "sides", "device", "majority", "sides by the second", "answers of a device")
    print(table(heads, [[name, *figures] for name, figures in flaps.items()]))
    checks = {
        f"goodput {goodput / capacity:.2f} of capacity": goodput >= MIN_GOODPUT * capacity,
        f"interactive p99 ttft {loaded_ms / base:.2f} times the unloaded": loaded_ms <= slowest * base,
        f"rejected, but not by priority: {rejected}": (
            rejected["bulk"] >= rejected["standard"] >= rejected["interactive"]
        ),
        f"memory grew: {grown}": all(mb <= MAX_GROWTH_MB for mb in grown.values()),
        f"recovered after {recovered:.1f} s": recovered <= RECOVERY_S,
        f"tiers flap: {flaps}": all(
            sides <= SIDES_PER_MINUTE and (of_device <= FLAPS_PER_MINUTE or name == "bulk")
            for name, (sides, of_device, *_) in flaps.items()
        ),
    }
    return [text for text, holds in checks.items() if not holds] + faulty(under + calm)


def majority_changes(results: list[RequestResult], start: float, stop: float) -> int:
    """Count the changes of the tier that answers most of a second's requests."""
    most = [tiers.most_common(1)[0][0] for tiers in _by_window(results, start, stop, 1)]
    return sum(one != other for one, other in itertools.pairwise(most))


def side_changes(results: list[RequestResult], start: float, stop: float, window_s: int = SIDES_WINDOW_S) -> int:
    """Count the changes of the tier that answers at least SIDES of a window's requests; other windows are ignored."""
    most = [(tiers.total(), *tiers.most_common(1)[0]) for tiers in _by_window(results, start, stop, window_s)]
    clear = [tier for total, tier, count in most if count >= SIDES * total]
    return sum(one != other for one, other in itertools.pairwise(clear))


def device_changes(results: list[RequestResult], start: float, stop: float) -> float:
    """Return how often a device was answered by another tier than the time before, the mean over the devices."""
    last: dict[int, str] = {}
    count = 0
    for each in answers(results):
        if start <= each.sent_at < stop:
            count += last.get(each.device, each.tier) != each.tier
            last[each.device] = each.tier
    return count / max(1, len(last))


def _by_window(
    results: list[RequestResult], start: float, stop: float, window_s: int
) -> list[collections.Counter[str]]:
    """Return the number of answers of each tier, window by window."""
    windows: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for each in answers(results):
        if start <= each.sent_at < stop:
            windows[int((each.sent_at - start) / window_s)][each.tier] += 1
    return [windows[at] for at in sorted(windows)]


def recovery_s(calm: list[RequestResult], stop: float, ttft_s: float) -> float:
    """Return when, s after `stop`, the last request was sent that was late, rejected or degraded."""
    bad = [
        each.sent_at - stop
        for each in calm
        if each.outcome != "answer" or each.degraded or each.tier != "assistant-large" or each.ttft_s > ttft_s
    ]
    return quantile(bad, 1.0)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--times", type=float, default=3.0)
    add_without(parser)
    add_arguments(parser)
    parser.add_argument(
        "--fallback", action=argparse.BooleanOptionalAction, default=True, help="requests may fall back to a lower tier"
    )


def main(arguments: argparse.Namespace) -> list[Row]:
    tier = {"concurrency": 16, "max_queued": 64, "ttft_objective_s": 2 * SPEED.prefill_s}
    config = {"degradation": {"tiers": TIERS}} if arguments.fallback else {}
    with running_bed(
        TIERS, speed=SPEED, tier=tier, config=config, workers=arguments.workers, without=arguments.without
    ) as bed:
        failures = asyncio.run(measure(bed, arguments.seconds, arguments.times, arguments.backlog))
    return checks(failures)
