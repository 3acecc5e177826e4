"""`decide` with the default policy: µs per decision, the reading of its signals included; and what a promise and
budgets add to it.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from pathlib import Path

import msgspec

from causeway_server.router.decision.decide import decide, plan_cache
from causeway_server.router.policy.compiled import Policy, parse_policy
from causeway_server.router.types import (
    CloudSignals,
    DeviceSignals,
    EdgeSignals,
    EnergySignals,
    Estimates,
    ImagePart,
    Message,
    NowSignals,
    Prefer,
    PromiseSignals,
    Request,
    RoutingHints,
    Sampling,
    Snapshot,
    SpendSignals,
    TextPart,
    Tool,
)
from tests.tool import run_tool

from .rows import Row, scaled

POLICY = Path(__file__).parents[2] / "policies" / "default.yaml"
LIMIT = 6.0  # yardsticks
MAX_TIMES = 1.2  # with a promise and budgets
ROUNDS = 7
CALLS = 20_000  # of one round

_CLOUD, _HANDOFF = "first_token_timeout: 10s", "handoff: {after_tokens: 8, below: 0.55}"

Ask = tuple[Request, Snapshot, Estimates]


def main() -> list[Row]:
    """The median round counts: on a shared machine a single round says more about the neighbours."""
    policy = parse_policy(POLICY.read_text(), str(POLICY))
    asks = mixed()
    rounds = sorted((_measure(policy, asks) for _ in range(ROUNDS)), key=lambda figures: figures[1])
    p50, p99, cache_p50 = rounds[ROUNDS // 2]
    times, pairs = _times(asks)
    spread = f"between {rounds[0][1]:.1f} and {rounds[-1][1]:.1f} us in the {ROUNDS} rounds"
    note = f"{len(asks)} kinds of requests, {CALLS} calls a round; the cache's plan takes {cache_p50:.1f} us (median)"
    return [
        scaled("routing decision, median, in yardsticks", p50, note=note),
        scaled("routing decision, 99th percentile, in yardsticks", p99, LIMIT, spread),
        Row(
            "routing decision, 99th percentile: with a promise and budgets ÷ without", times, "x", MAX_TIMES, note=pairs
        ),
    ]


def _times(asks: list[Ask]) -> tuple[float, str]:
    """Return the p99 with a promise and budgets over that of the same policy without, and both medians in words.

    The two policies decide in turns, so that what disturbs the machine disturbs both.
    """
    priced = POLICY.read_text().replace(_CLOUD, f"{_CLOUD}\n    price: {{input: 1, output: 2}}")
    without = f"{priced}\nshadow: {{share: 0.01, usd_per_day: 1}}\n"
    promised = without.replace(_HANDOFF, f"{_HANDOFF}\n    promise: {{of: large, keep: 0.95}}")
    budget = "budget: {usd_per_day: 5, battery: {until: '18:00'}, heat: {}}"
    policies = parse_policy(without), parse_policy(f"{promised}{budget}\n")
    replace, kept = msgspec.structs.replace, {"fast-path": PromiseSignals(0.8, 500)}
    energy = EnergySignals(price=3.0, limit="battery", wh_left=4.0, token_wh=1e-4, cloud_wh=1e-3)

    def paced(now: Snapshot) -> Snapshot:
        return replace(now, promises=kept, spend=replace(now.spend, usd_left=3.0, price=20.0), energy=energy)

    told = [(request, paced(now), estimates) for request, now, estimates in asks]
    rounds = [_in_turns([(policies[0], asks), (policies[1], told)]) for _ in range(ROUNDS)]
    one, both = (statistics.median(found) for found in zip(*rounds, strict=True))
    return statistics.median(more / less for less, more in rounds), f"without {one:.1f} us, with {both:.1f} us"


def _in_turns(sides: list[tuple[Policy, list[Ask]]]) -> tuple[float, ...]:
    """Return each side's p99 of `decide`, µs."""
    clock = time.perf_counter_ns
    took: list[list[int]] = [[] for _ in sides]
    gc.collect()
    for index in range(CALLS):
        for (policy, asks), found in zip(sides, took, strict=True):
            request, snapshot, estimates = asks[index % len(asks)]
            start = clock()
            decide(policy, request, snapshot, estimates)
            found.append(clock() - start)
    return tuple(sorted(found)[CALLS * 99 // 100] / 1e3 for found in took)


def mixed() -> list[Ask]:
    """What a day brings: short and long, streams, wishes, private, tools, images, down targets, unreadable signals."""
    full = Snapshot(
        device=DeviceSignals(54.5, False, 3100.0, 0.31, 7.2, 0.9),
        edge=EdgeSignals(queue=1, tokens_per_s=38.0, loaded=True),
        cloud=CloudSignals(reachable=True, rtt_ms=38.0, breaker="closed", tier="assistant-large"),
        spend=SpendSignals(0.1, 1.2, 20.0),
        now=NowSignals(14, 3, 25, 1_700_000_000),
    )
    hot = msgspec.structs.replace(full, device=DeviceSignals(temperature_c=93.0))
    no_cloud = msgspec.structs.replace(full, cloud=CloudSignals(False, None, "open"), down=frozenset({"large"}))
    bare = Snapshot()
    short, long = Estimates(prompt_tokens=14), Estimates(prompt_tokens=700)
    image = Message("user", (TextPart("what is this?"), ImagePart("https://example.org/a.png")))
    return [
        (_chat(), full, short),
        (_chat(temperature=0.0), full, short),
        (_chat(stream=True), full, long),
        (_chat(tags=("kiosk", "private")), full, long),
        (_chat(prefer="only_on_device"), full, short),
        (_chat(prefer="prefer_cloud"), full, short),
        (_chat(prefer="only_cloud", tags=("private",)), full, short),
        (_chat(), hot, short),
        (_chat(), no_cloud, short),
        (_chat(), no_cloud, long),
        (_chat(), bare, Estimates()),
        (_chat(model="small"), full, short),
        (msgspec.structs.replace(_chat(), tools=(Tool("t"),)), full, long),
        (msgspec.structs.replace(_chat(), messages=(image,)), full, short),
        (msgspec.structs.replace(_chat(), kind="embedding"), full, short),
    ]


def _chat(
    *,
    model: str = "auto",
    temperature: float | None = None,
    stream: bool = False,
    tags: tuple[str, ...] = (),
    prefer: Prefer | None = None,
) -> Request:
    messages = tuple(Message("user" if turn % 2 == 0 else "assistant", "turn the lights on") for turn in range(7))
    hints = RoutingHints(prefer=prefer, tags=tags, client="till-7")
    sampling = Sampling(temperature=temperature)
    return Request(kind="chat", model=model, messages=messages, stream=stream, sampling=sampling, hints=hints)


def _measure(policy: Policy, asks: list[Ask]) -> tuple[float, float, float]:
    """p50 and p99 of `decide`, p50 of `plan_cache`, in µs."""
    decisions, plans = [], []
    clock = time.perf_counter_ns
    gc.collect()
    for index in range(CALLS):
        request, snapshot, estimates = asks[index % len(asks)]
        start = clock()
        decide(policy, request, snapshot, estimates)
        middle = clock()
        plan_cache(policy, request, snapshot, estimates)
        plans.append(clock() - middle)
        decisions.append(middle - start)
    decisions.sort()
    plans.sort()
    return decisions[CALLS // 2] / 1e3, decisions[CALLS * 99 // 100] / 1e3, plans[CALLS // 2] / 1e3


def _print_rows() -> None:
    for row in main():
        print(f"{row.name}: {row.value:.2f} {row.unit}  {row.note}")


if __name__ == "__main__":
    sys.exit(run_tool(_print_rows))
