"""What the capacity calculator says a replica can do, against what a real Triton does.

The replica is measured with short and long prompts and answers; the plan is then for a mix that was not measured, and
that mix is run with the replica saturated.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from pathlib import Path

import aiohttp
import msgspec

from causeway_server.cloud_pool.planning import (
    ExpectedLoad,
    Lengths,
    LoadRun,
    MeasuredEndpoint,
    PlanTargets,
    ReplicaMeasurement,
    ReplicaProfile,
    measure,
    plan,
)
from tests.stack import TOKEN, Stack

from .rows import Row

SLOTS = 8
ROUNDS = 5
WORDS, ANSWER_TOKENS = 80, 40  # the mix: neither the prompts' length nor the answers' was measured


def main() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        stack = Stack(Path(folder))
        try:
            stack.start_triton("--sequences", str(SLOTS)).ready()
            stack.start_gateway().ready()
            return [asyncio.run(_compared(f"{stack.gateway_url}/v1"))]
        finally:
            stack.close()


async def _compared(url: str) -> Row:
    """Measured and planned in turn, so that a machine that is busy elsewhere is busy for both."""
    ratios, seen = [], []
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {TOKEN}"}) as session:
        endpoint = MeasuredEndpoint(session, url, "assistant-large")
        for _ in range(ROUNDS):
            measured = await measure(endpoint, (SLOTS,))
            run = await endpoint.run(SLOTS, 6 * SLOTS, words=WORDS, answer_tokens=ANSWER_TOKENS)
            predicted = _predicted_rps(run, measured)
            ratios.append(predicted / (run.requests / run.seconds))
            seen.append(f"{predicted:.1f}/{run.requests / run.seconds:.1f}")
    # Either way off is wrong: 1.25 means that the estimate was a quarter above or below what was measured.
    ratio = statistics.median(ratios)
    note = f"requests/s of one replica, predicted/measured a round: {', '.join(seen)}; median ratio {ratio:.2f}"
    return Row("(plan) capacity, predicted against measured", max(ratio, 1 / ratio), "x", 1.3, note=note)


def _predicted_rps(run: LoadRun, measured: ReplicaMeasurement) -> float:
    replica = ReplicaProfile(**msgspec.structs.asdict(measured), slots=SLOTS)
    load = ExpectedLoad(
        peak_rps=1.0,
        prompt=Lengths(run.prompt_tokens / run.requests),
        completion=Lengths(run.completion_tokens / run.requests),
    )
    return plan(load, replica, PlanTargets()).replica_rps
