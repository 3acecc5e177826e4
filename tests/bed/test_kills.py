"""The kill matrix in short: every part is killed, on real processes, and what was promised holds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cloud_pool.cli.main import ENVIRONMENT

from .bed import laddered, standing
from .kills import LONG, TIERS, VICTIMS, run, summary

SEED = 20
PLAN = [["triton", "gateway"], ["stub", "worker"], ["tritons", "redis"]]


@pytest.mark.triton
@pytest.mark.redis
@pytest.mark.slow
async def test_kill_matrix() -> None:
    """kill -9 of each part under load: no job lost, no effect doubled, one outcome a stream, few calls twice."""
    if not (Path(os.environ.get("CAUSEWAY_TRITON_ENV", ENVIRONMENT)) / "triton.json").is_file():
        pytest.skip("no Triton environment: `make setup` makes it")
    assert {victim for victims in PLAN for victim in victims} == set(VICTIMS)
    with standing(TIERS, model="journaled", pace=LONG, config=laddered(*TIERS)) as bed:
        rounds, wrong = await run(bed, PLAN, SEED, within_s=1.5, streams_per_s=6.0, jobs_per_s=2.0)
    assert not wrong, "\n".join([*wrong, summary(rounds)])
    assert all(one.jobs and one.outcomes["answer"] > 0 for one in rounds)
    assert sum(one.outcomes.total() - one.outcomes["answer"] for one in rounds) > 0, "no kill was felt: no test"
