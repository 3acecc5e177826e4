"""`python -m tests.bed.overload [--seconds 60] [--times 3]`: a tier gets three times what it can do.

Of `assistant-large` and `assistant`, both paced, the load asks for the first. Interactive and standard requests alone
are what it can do; bulk is the rest. First the capacity is measured, by as many clients as the replica has slots, and
the time to the first token without load. Then, and after the load's end:

1. goodput is at least GOODPUT of the capacity
2. interactive requests' 99th percentile of the time to the first token is at most SLOWER times the unloaded one
3. bulk is refused more often than standard, and that more often than interactive
4. queues and memory are bounded
5. within RECOVERY_S of the end all is as before
6. nobody flaps

Work of which a part fits is divided between the tiers, and which tier most of a second's answers come from is then
chance: at a share that never moves from one half it changes thirty times a minute. It is printed, and not judged. What
an operator sees is a kind that changes sides: two thirds of a second's answers from the one tier, later two thirds from
the other. What a user sees is a device that is answered by another tier than the last time (with a draw for each
request, every other time at one half). Both may happen FLAPS_PER_MINUTE times, the second to a device on average. Of
bulk only the sides count: it gets what room there is anywhere, where it would be refused otherwise. A device keeps to
its gateway here, as its connection does.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import itertools
import sys
import time

import aiohttp
import msgspec

from cloud_pool.config.schema import Config, TierConfig

from .asking import Told
from .bed import Bed, Pace, standing
from .figures import quantile, table
from .load import GAUGES, HEADS, Gauges, Kind, closed, good, loaded, odd, row, ttft_ms

TIERS = ("assistant-large", "assistant")
PACE = Pace(slots=16, prefill_s=0.2, step_s=0.1)
TOKENS = 4
GOODPUT = 0.9
SLOWER = 2.0
RECOVERY_S = 5.0
GROWN_MB = 15.0
FLAPS_PER_MINUTE = 6.0
DEVICES = 40
SIDES = 2.0 / 3.0
SETTLE_S = 10.0


async def measured(bed: Bed, seconds: float, times: float) -> list[str]:
    """What was wrong."""
    token = bed.token("acme")
    devices = tuple(bed.token("acme", f"kiosk-{number}") for number in range(DEVICES))
    plain = Kind(name="interactive", per_s=4.0, token=token, devices=devices)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await closed(session, bed.urls, plain, 4, 2.0)
        unloaded = await loaded(session, bed.urls, (plain,), SETTLE_S)
        began = time.monotonic()
        full = await closed(session, bed.urls, plain, PACE.slots, SETTLE_S)
        capacity = len(good(full)) / (max(told.ended_at for told in full) - began)
        expected = PACE.slots / (PACE.prefill_s + (TOKENS - 1) * PACE.step_s)
        print(f"capacity {capacity:.1f} requests/s by {PACE.slots} clients; {expected:.1f} by the replica's clock")
        kinds = (
            msgspec.structs.replace(plain, per_s=0.5 * capacity),
            msgspec.structs.replace(plain, name="standard", per_s=0.5 * capacity, priority="standard"),
            msgspec.structs.replace(plain, name="bulk", per_s=(times - 1.0) * capacity, priority="bulk"),
        )
        async with Gauges(session, bed.urls, GAUGES) as gauges:
            load = asyncio.ensure_future(loaded(session, bed.urls, kinds, seconds))
            await asyncio.sleep(min(SETTLE_S, seconds / 3))
            before = bed.memory_mb()
            start = time.monotonic()
            await asyncio.sleep(seconds - min(SETTLE_S, seconds / 3))
            stop = time.monotonic()
            after = bed.memory_mb()
        recovering = asyncio.ensure_future(loaded(session, bed.urls, (plain,), 2 * SETTLE_S))
        under = await load
        calm = await recovering
    return judged(capacity, unloaded, under, calm, (start, stop), gauges, before, after)


def judged(
    capacity: float,
    unloaded: list[Told],
    under: list[Told],
    calm: list[Told],
    span: tuple[float, float],
    gauges: Gauges,
    before: dict[str, float],
    after: dict[str, float],
) -> list[str]:
    by_kind = {kind: [told for told in under if told.kind == kind] for kind in ("interactive", "standard", "bulk")}
    rows = [row("unloaded", unloaded), *(row(kind, told) for kind, told in by_kind.items()), row("after", calm)]
    print(table(HEADS, rows))
    start, stop = span
    ended = [told for told in good(under) if start <= told.ended_at < stop]
    goodput = len(ended) / (stop - start)
    tiers = collections.Counter(told.tier for told in ended)
    base, loaded_ms = ttft_ms(good(unloaded), 0.99), ttft_ms(good(by_kind["interactive"]), 0.99)
    minutes = (stop - start) / 60.0
    flaps = {
        kind: (
            swings(told, start, stop) / minutes,
            changes(told, start, stop) / minutes,
            flips(told, start, stop) / minutes,
            sum(start <= each.asked_at < stop for each in good(told)) / DEVICES / minutes,
        )
        for kind, told in by_kind.items()
    }
    grown = {name: after[name] - before[name] for name in before if name.startswith("gateway")}
    recovered = recovery_s(calm, stop, 1.5 * base / 1000.0)
    refused = {kind: sum(told.outcome != "answer" for told in all_) / len(all_) for kind, all_ in by_kind.items()}
    print(f"goodput {goodput:.1f}/s = {goodput / capacity:.2f} of capacity, by tier {dict(tiers)}")
    print(f"interactive p99 ttft {loaded_ms:.0f} ms = {loaded_ms / base:.2f} times the unloaded {base:.0f} ms")
    print("not answered:", {kind: f"{share:.1%}" for kind, share in refused.items()})
    print(f"gauges of a gateway, mean to most: {gauges}")
    print("gateways grew, MB:", {name: round(mb, 1) for name, mb in grown.items()})
    print(f"recovered {recovered:.1f} s after the end")
    heads = ("changes of tier a minute", "sides", "a device's", "a second's most", "of a device's answers")
    print(table(heads, [[kind, *found] for kind, found in flaps.items()]))
    checks = {
        f"goodput {goodput / capacity:.2f} of capacity": goodput >= GOODPUT * capacity,
        f"interactive p99 ttft {loaded_ms / base:.2f} times the unloaded": loaded_ms <= SLOWER * base,
        f"refused not by priority: {refused}": refused["bulk"] >= refused["standard"] >= refused["interactive"],
        f"memory grew: {grown}": all(mb <= GROWN_MB for mb in grown.values()),
        f"recovered after {recovered:.1f} s": recovered <= RECOVERY_S,
        f"tiers flap: {flaps}": all(
            sides <= FLAPS_PER_MINUTE and (own <= FLAPS_PER_MINUTE or kind == "bulk")
            for kind, (sides, own, _, _) in flaps.items()
        ),
    }
    return [what for what, held in checks.items() if not held] + odd(under + calm)


def flips(told: list[Told], start: float, stop: float) -> int:
    """How often the tier that answers most of a second's requests changes."""
    most = [tiers.most_common(1)[0][0] for tiers in _by_second(told, start, stop)]
    return sum(one != other for one, other in itertools.pairwise(most))


def swings(told: list[Told], start: float, stop: float) -> int:
    """The same, of a tier that answers SIDES of a second's requests at least: between these nothing has changed."""
    most = [(tiers.total(), *tiers.most_common(1)[0]) for tiers in _by_second(told, start, stop)]
    clear = [tier for total, tier, count in most if count >= SIDES * total]
    return sum(one != other for one, other in itertools.pairwise(clear))


def changes(told: list[Told], start: float, stop: float) -> float:
    """How often a device was answered by another tier than the time before, on average over the devices."""
    last: dict[int, str] = {}
    count = 0
    for each in good(told):
        if start <= each.asked_at < stop:
            count += last.get(each.device, each.tier) != each.tier
            last[each.device] = each.tier
    return count / max(1, len(last))


def _by_second(told: list[Told], start: float, stop: float) -> list[collections.Counter[str]]:
    """How many of each second's answers came from each tier."""
    seconds: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for each in good(told):
        if start <= each.asked_at < stop:
            seconds[int(each.asked_at - start)][each.tier] += 1
    return [seconds[at] for at in sorted(seconds)]


def recovery_s(calm: list[Told], stop: float, ttft_s: float) -> float:
    """When the last of the calm requests was asked that was not as it should be."""
    bad = [
        told.asked_at - stop
        for told in calm
        if told.outcome != "answer" or told.degraded or told.tier != "assistant-large" or told.ttft_s > ttft_s
    ]
    return quantile(bad, 1.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--times", type=float, default=3.0)
    parser.add_argument("--ladder", action=argparse.BooleanOptionalAction, default=True, help="work may fall a tier")
    told = parser.parse_args()
    tier: dict[str, float] = {"concurrency": 16, "max_queued": 64}
    if "ttft_objective_s" in TierConfig.__struct_fields__:
        tier["ttft_objective_s"] = 2 * PACE.prefill_s
    more = {"degradation": {"tiers": TIERS}} if told.ladder and "degradation" in Config.__struct_fields__ else {}
    with standing(TIERS, pace=PACE, tier=tier, config=more, workers=0) as bed:
        wrong = asyncio.run(measured(bed, told.seconds, told.times))
    for what in wrong:
        print(f"WRONG: {what}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
