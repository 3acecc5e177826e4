"""A burst far beyond a tier's capacity."""

from __future__ import annotations

import asyncio
import collections
import os
from pathlib import Path

import aiohttp
import pytest

from causeway_server.cloud_pool.cli.triton import ENVIRONMENT

from .bed import ReplicaSpeed, running_bed
from .client import RequestResult, send

TIER = "assistant-large"
BURST = 120
SPEED = ReplicaSpeed(slots=4, prefill_s=0.05, step_s=0.02)


@pytest.mark.triton
@pytest.mark.redis
@pytest.mark.slow
async def test_each_request_of_a_burst_is_answered_or_rejected_with_retry_after() -> None:
    if not (Path(os.environ.get("CAUSEWAY_TRITON_ENV", ENVIRONMENT)) / "triton.json").is_file():
        pytest.skip("no Triton environment: `make setup` makes it")
    tier = {"concurrency": 4, "max_queued": 8}
    with running_bed((TIER,), speed=SPEED, tier=tier, workers=0) as bed:
        token = bed.token("acme")
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def send_one(number: int) -> RequestResult:
                url = bed.urls[number % 2]
                return await send(session, url, profile="burst", tier=TIER, token=token, tokens=4, deadline_ms=55_000)

            results = await asyncio.gather(*(send_one(number) for number in range(BURST)))
            outcomes = collections.Counter(each.outcome for each in results)
            assert set(outcomes) == {"answer", "rejected"}, outcomes
            for each in results:
                if each.outcome == "rejected":
                    assert each.status in (429, 503)
                    assert int(each.retry_after) >= 1
            assert len(bed.replicas[0].calls()) <= BURST
            after = await send_one(0)
        assert after.outcome == "answer"
