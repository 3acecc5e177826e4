"""`python -m tests.bench fanout`: one tenant fans out, another chats.

The quiet tenant sends chats, a fifth of the tier's capacity, throughout. In turns with it alone, the other tenant sends
completions of n=16 answers to each of 8 prompts, 6 of them at any moment: 768 sequences for a server of 16. The quiet
tenant's 99th percentiles, to the first token and of the complete answer, may rise by MAX_RISE, and all its requests are
answered; the other's are answered too.

The quiet tenant's requests arrive at the same moments in the calm and under the attack. With `--model journaled` the
replica is the product's engine with real weights instead of one whose speed is set by the clock: an answer then also
takes longer because the engine works on more sequences at once, which no queue can help, so nothing is judged.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time

import aiohttp

from causeway_server.cloud_pool.admission import AdmissionConfig
from tests.bench.rows import Row, checks

from .bed import Bed, Model, running_bed
from .client import RequestResult, new_mark
from .figures import table
from .load import GAUGES, GaugeSampler, LoadProfile, answers, open_loop, ttft_ms
from .overload import SPEED, TOKENS
from .slow import duration_ms

CHOICES, PROMPTS, PARALLEL = 16, 8, 6
MAX_RISE = 0.2
SETTLE_S = 5.0
DEADLINE_S = 60.0
_CAPACITY = SPEED.slots / (SPEED.prefill_s + (TOKENS - 1) * SPEED.step_s)


async def fan_out(session: aiohttp.ClientSession, url: str, token: str) -> RequestResult:
    """Send one completion with many choices; errors become the outcome."""
    result = RequestResult(mark=new_mark(), profile="fan-out", sent_at=time.monotonic())
    prompts = [f"turn on the light {at} qz{result.mark}qz" for at in range(PROMPTS)]
    body = {"model": "assistant-large", "prompt": prompts, "n": CHOICES, "max_tokens": TOKENS, "ignore_eos": True}
    headers = {
        "authorization": f"Bearer {token}",
        "x-causeway-priority": "interactive",
        "x-causeway-deadline-ms": str(round(1000 * DEADLINE_S)),
    }
    try:
        async with (
            asyncio.timeout(2 * DEADLINE_S),
            session.post(f"{url}/v1/completions", json=body, headers=headers) as reply,
        ):
            result.status, document = reply.status, await reply.json()
        if result.status == 200:
            complete = [choice for choice in document["choices"] if choice["finish_reason"] == "length"]
            result.outcome = "answer" if len(complete) == CHOICES * PROMPTS else "invalid"
        else:
            result.outcome, result.code = "rejected", document["error"]["code"]
    except (aiohttp.ClientError, ConnectionError) as error:
        result.outcome, result.code = "connection", type(error).__name__
    except TimeoutError:
        result.outcome = "unresolved"
    result.ended_at = time.monotonic()
    return result


async def attack(session: aiohttp.ClientSession, urls: tuple[str, ...], token: str) -> list[RequestResult]:
    """Keep PARALLEL fan-outs in progress until cancelled; then end them, and return those that had ended by then."""
    results: list[RequestResult] = []
    turns = itertools.cycle(urls)

    async def client(url: str) -> None:
        while True:
            results.append(await fan_out(session, url, token))
            if results[-1].outcome != "answer":
                await asyncio.sleep(0.1)

    tasks = [asyncio.create_task(client(next(turns))) for _ in range(PARALLEL)]
    try:
        await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return results


async def measure(bed: Bed, seconds: float, rounds: int, *, judged: bool) -> list[str]:
    """Apply the load and return the failed checks."""
    quiet = LoadProfile(name="quiet", per_s=0.2 * _CAPACITY, token=bed.token("quiet"))
    loud = bed.token("loud")
    in_calm: list[RequestResult] = []
    attacked: list[RequestResult] = []
    fan_outs: list[RequestResult] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await open_loop(session, bed.urls, (quiet,), SETTLE_S)
        for turn in range(1, rounds + 1):
            in_calm += await open_loop(session, bed.urls, (quiet,), seconds, seed=turn)
            flood = asyncio.create_task(attack(session, bed.urls, loud))
            async with GaugeSampler(session, bed, GAUGES) as gauges:
                attacked += await open_loop(session, bed.urls, (quiet,), seconds, seed=turn)
            flood.cancel()
            fan_outs += await flood
            print(f"attack {turn}: gauges of a gateway, mean to maximum: {gauges}")
            await open_loop(session, bed.urls, (quiet,), SETTLE_S)
    if judged:
        print(f"at most {bed.replicas[0].peak} sequences were in the replica at once, which has {SPEED.slots} slots")
    return check(in_calm, attacked, fan_outs, judged=judged)


def check(
    in_calm: list[RequestResult], attacked: list[RequestResult], fan_outs: list[RequestResult], *, judged: bool
) -> list[str]:
    heads = ("quiet tenant", "sent", "answered", "ttft p50 ms", "p99", "answer p50 ms", "p99", "errors")
    rows = [
        [
            name,
            len(results),
            len(answers(results)),
            *(f"{figure(results, share):.0f}" for figure in (_first_ms, duration_ms) for share in (0.5, 0.99)),
            ", ".join(sorted({f"{each.outcome} {each.code}" for each in results if each.outcome != "answer"})),
        ]
        for name, results in (("calm", in_calm), ("attacked", attacked))
    ]
    print(table(heads, rows))
    outcomes = sorted({f"{each.outcome} {each.status} {each.code}" for each in fan_outs if each.outcome != "answer"})
    print(f"fan-outs: {len(answers(fan_outs))} of {len(fan_outs)} answered {outcomes}")
    if not answers(in_calm) or not answers(attacked):
        return ["the quiet tenant got no answer"]
    ratios = {
        name: figure(attacked, 0.99) / figure(in_calm, 0.99)
        for name, figure in (("to the first token", _first_ms), ("of the answer", duration_ms))
    }
    print("the quiet tenant's p99, attacked to calm:", {name: f"{ratio:.2f}" for name, ratio in ratios.items()})
    failed = len(attacked) - len(answers(attacked))
    checks = {
        **{f"p99 {name} is {ratio:.2f} times the calm one": ratio <= 1 + MAX_RISE for name, ratio in ratios.items()},
        f"{failed} of the quiet tenant's {len(attacked)} requests were not answered": not failed,
        f"fan-outs failed: {outcomes}": not outcomes and bool(fan_outs),
    }
    return [text for text, holds in checks.items() if not holds] if judged else []


def _first_ms(results: list[RequestResult], share: float) -> float:
    return ttft_ms(answers(results), share)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=40.0, help="duration of each calm and each attack")
    parser.add_argument("--rounds", type=int, default=2, help="number of pairs of a calm and an attack")
    parser.add_argument("--model", choices=("paced", "journaled"), default="paced")
    parser.add_argument("--reserved-share", type=float, default=AdmissionConfig().reserved_share)


def main(arguments: argparse.Namespace) -> list[Row]:
    model: Model = arguments.model
    tier = {"concurrency": SPEED.slots, "max_queued": 1024, "admission": {"reserved_share": arguments.reserved_share}}
    with running_bed(("assistant-large",), model=model, speed=SPEED, tier=tier, workers=0) as bed:
        failures = asyncio.run(measure(bed, arguments.seconds, arguments.rounds, judged=model == "paced"))
    return checks(failures)
