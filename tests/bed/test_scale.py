"""A tier's permits, through real gateways and workers: they follow the endpoints, and jobs stay within them."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from causeway_server.cloud_pool.cli.triton import ENVIRONMENT

from .bed import Bed, ReplicaSpeed, running_bed
from .client import body_of, new_mark, send

pytestmark = [pytest.mark.triton, pytest.mark.redis, pytest.mark.slow]
TIER = "assistant-large"
SPEED = ReplicaSpeed(slots=64, prefill_s=0.3, step_s=0.05)
CONCURRENCY = 4
TIMEOUT_S = 60.0
_LIMIT = re.compile(r"^causeway_gateway_concurrency_limit\{.*\} (\S+)$", re.MULTILINE)


@pytest.fixture(autouse=True)
def _triton() -> None:
    if not (Path(os.environ.get("CAUSEWAY_TRITON_ENV", ENVIRONMENT)) / "triton.json").is_file():
        pytest.skip("no Triton environment: `make setup` makes it")


async def limit_of(session: aiohttp.ClientSession, bed: Bed) -> float:
    """Return the sum of the gateways' limits."""
    total = 0.0
    for url in bed.operator_urls:
        async with session.get(f"{url}/metrics", headers=bed.operator_headers) as reply:
            total += sum(map(float, _LIMIT.findall(await reply.text())))
    return total


async def until(holds: Callable[[float], bool], session: aiohttp.ClientSession, bed: Bed) -> None:
    """Wait until the gateways' limits are so."""
    async with asyncio.timeout(TIMEOUT_S):
        while not holds(await limit_of(session, bed)):
            await asyncio.sleep(0.1)


async def test_permits_follow_endpoints_out_and_back_and_no_request_fails() -> None:
    tier = {"concurrency": CONCURRENCY, "min_concurrency": 0, "ttft_objective_s": TIMEOUT_S}
    with running_bed((TIER,) * 2, speed=SPEED, tier=tier, workers=0, serving=1) as bed:
        token, done, outcomes = bed.token("acme"), asyncio.Event(), []

        async def client(session: aiohttp.ClientSession, url: str) -> None:
            while not done.is_set():
                result = await send(session, url, profile="all", tier=TIER, token=token, tokens=4)
                outcomes.append(result.outcome)

        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
            for number in range(3 * CONCURRENCY):
                tasks.create_task(client(session, bed.urls[number % 2]))
            await until(lambda limit: limit == CONCURRENCY, session, bed)
            bed.serve_from(bed.replicas)
            await until(lambda limit: limit == 2 * CONCURRENCY, session, bed)
            bed.serve_from(bed.replicas[1:])
            await until(lambda limit: limit == CONCURRENCY, session, bed)
            done.set()
        assert set(outcomes) == {"answer"}
        assert all(replica.peak for replica in bed.replicas)


async def test_workers_together_stay_within_the_permits_of_the_tier() -> None:
    """Four workers with more jobs than permits; each alone would take all. Twice the permits would be two of them: on a
    busy machine heartbeats are late."""
    tier = {"concurrency": CONCURRENCY, "min_concurrency": 0}
    with running_bed((TIER,), speed=SPEED, tier=tier, workers=4) as bed:
        headers = {"authorization": f"Bearer {bed.token('acme')}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            ids = []
            for _ in range(40):
                async with session.post(
                    f"{bed.urls[0]}/v1/jobs", json=body_of(new_mark(), TIER, 4, stream=False)
                ) as reply:
                    assert reply.status == 202, await reply.text()
                    ids.append((await reply.json())["id"])
            async with asyncio.timeout(TIMEOUT_S):
                while ids:
                    async with session.get(f"{bed.urls[0]}/v1/jobs/{ids[-1]}") as reply:
                        status = (await reply.json())["status"]
                        assert status in ("queued", "running", "waiting", "succeeded")
                    if status == "succeeded":
                        ids.pop()
                    else:
                        await asyncio.sleep(0.1)
        assert bed.replicas[0].peak < 2 * CONCURRENCY
