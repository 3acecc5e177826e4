"""`python -m tests.bed.tenants`: two tenants of one tier, and one of them floods it.

The quiet tenant asks for a fifth of what the tier can do, all the while; the other first does the same, then asks for
three times what the tier can do, at the same priority, and so on in turns. The quiet one's 99th percentile, to the
first token and of the whole answer, may move by MOVED, and its requests are answered.

In a flood it asks at the very moments at which it asked in the calm before, so that its own bursts are in both; and all
calms and all floods are taken together, from the first moment of each, for of a few hundred requests the 99th
percentile is the third worst.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

import aiohttp
import msgspec

from .asking import Told
from .bed import Bed, standing
from .figures import table
from .load import GAUGES, HEADS, Gauges, Kind, good, loaded, odd, row, ttft_ms
from .overload import PACE, TOKENS
from .slow import took_ms

MOVED = 0.2
SETTLE_S = 5.0
_CAPACITY = PACE.slots / (PACE.prefill_s + (TOKENS - 1) * PACE.step_s)


async def measured(bed: Bed, seconds: float, times: float, rounds: int) -> list[str]:
    """What was wrong."""
    quiet = Kind(name="quiet", per_s=0.2 * _CAPACITY, token=bed.token("quiet"))
    other = Kind(name="other", per_s=0.2 * _CAPACITY, token=bed.token("loud"))
    flood = msgspec.structs.replace(other, name="flood", per_s=times * _CAPACITY)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        calm: list[Told] = []
        loud: list[Told] = []
        await loaded(session, bed.urls, (quiet, other), SETTLE_S)
        for turn in range(1, rounds + 1):
            before_it = await loaded(session, bed.urls, (quiet, other), seconds, seed=turn)
            async with Gauges(session, bed.urls, GAUGES) as gauges:
                in_it = await loaded(session, bed.urls, (quiet, flood), seconds, seed=turn)
            p99s = [f"{ttft_ms(good(_of(told, 'quiet')), 0.99):.0f} ms" for told in (before_it, in_it)]
            print(f"flood {turn}: the quiet tenant's p99 to the first token {p99s[0]} before it, {p99s[1]} in it")
            print(f"gauges of a gateway, mean to most: {gauges}")
            calm, loud = calm + before_it, loud + in_it
            await loaded(session, bed.urls, (quiet, other), SETTLE_S)
    before, after = (_of(told, "quiet") for told in (calm, loud))
    rows = {
        "quiet, calm": before,
        "other, calm": _of(calm, "other"),
        "quiet, flood": after,
        "flood": _of(loud, "flood"),
    }
    heads = (*HEADS, "took p50 ms", "p99")
    print(
        table(
            heads,
            [
                [*row(name, told), *(f"{took_ms(told, share):.0f}" for share in (0.5, 0.99))]
                for name, told in rows.items()
            ],
        )
    )
    moved = {
        "to the first token": ttft_ms(good(after), 0.99) / ttft_ms(good(before), 0.99) - 1.0,
        "of the answer": took_ms(after, 0.99) / took_ms(before, 0.99) - 1.0,
    }
    served = len(good(_of(loud, "flood"))) / seconds / rounds
    print("the quiet tenant's p99 moved by", {name: f"{share:+.1%}" for name, share in moved.items()})
    print(f"answered: {len(good(loud)) / seconds / rounds / _CAPACITY:.2f} of capacity, the flood {served:.1f}/s")
    wrong = [f"p99 {name} moved by {share:+.1%}" for name, share in moved.items() if share > MOVED]
    failed = len(after) - len(good(after))
    return (
        wrong
        + odd(calm + loud)
        + ([f"{failed} of the quiet tenant's {len(after)} requests were not answered"] if failed else [])
    )


def _of(told: list[Told], kind: str) -> list[Told]:
    return [each for each in told if each.kind == kind]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0, help="of each calm and each flood")
    parser.add_argument("--rounds", type=int, default=2, help="of a calm and a flood")
    parser.add_argument("--times", type=float, default=3.0, help="the capacity, for the flood")
    parser.add_argument(
        "--fixed", action="store_true", help="each gateway half of the slots, and no search for a limit"
    )
    told = parser.parse_args()
    tier = {"concurrency": PACE.slots, "max_queued": 64}
    if told.fixed:
        tier |= {"concurrency": PACE.slots // 2, "min_concurrency": 0}
    with standing(("assistant-large", "assistant"), pace=PACE, tier=tier, workers=0) as bed:
        wrong = asyncio.run(measured(bed, told.seconds, told.times, told.rounds))
    for what in wrong:
        print(f"WRONG: {what}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
