"""Much more than a tier can do, at once: honest refusals, one outcome each, and all well afterwards."""

from __future__ import annotations

import asyncio
import collections
import os
from pathlib import Path

import aiohttp
import pytest

from cloud_pool.cli.main import ENVIRONMENT

from .asking import Told, ask
from .bed import Pace, standing

MANY = 120
PACE = Pace(slots=4, prefill_s=0.05, step_s=0.02)


@pytest.mark.triton
@pytest.mark.redis
@pytest.mark.slow
async def test_a_burst_has_one_outcome_each() -> None:
    """Of a burst some are answered whole, the others are told when to come back, and the tier is free at the end."""
    if not (Path(os.environ.get("CAUSEWAY_TRITON_ENV", ENVIRONMENT)) / "triton.json").is_file():
        pytest.skip("no Triton environment: `make setup` makes it")
    tier = {"concurrency": 4, "max_queued": 8}
    with standing(("assistant-large",), pace=PACE, tier=tier, workers=0) as bed:
        token = bed.token("acme")
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def one(number: int) -> Told:
                url = bed.urls[number % 2]
                return await ask(session, url, kind="burst", tier="assistant-large", token=token, tokens=4)

            told = await asyncio.gather(*(one(number) for number in range(MANY)))
            outcomes = collections.Counter(each.outcome for each in told)
            assert set(outcomes) == {"answer", "refused"}, outcomes
            for each in told:
                if each.outcome == "refused":
                    assert each.status in (429, 503)
                    assert int(each.retry_after) >= 1
            assert len(bed.replicas[0].calls()) <= MANY
            after = await one(0)
        assert after.outcome == "answer"
