"""A short kill matrix on real processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cloud_pool.cli.main import ENVIRONMENT

from .bed import running_bed
from .kills import FALLBACK, LONG, TIERS, VICTIMS, run, summary

SEED = 20
PLAN = [["triton", "gateway"], ["stub", "worker"], ["tritons", "redis"]]


@pytest.mark.triton
@pytest.mark.redis
@pytest.mark.slow
async def test_killing_every_process_loses_no_job_and_doubles_no_effect() -> None:
    if not (Path(os.environ.get("CAUSEWAY_TRITON_ENV", ENVIRONMENT)) / "triton.json").is_file():
        pytest.skip("no Triton environment: `make setup` makes it")
    assert {victim for victims in PLAN for victim in victims} == set(VICTIMS)
    with running_bed(TIERS, model="journaled", speed=LONG, config=dict(FALLBACK)) as bed:
        rounds, failures = await run(bed, PLAN, SEED, within_s=1.5, streams_per_s=6.0, jobs_per_s=2.0)
    assert not failures, "\n".join([*failures, summary(rounds)])
    assert all(one.jobs and one.outcomes["answer"] > 0 for one in rounds)
    assert sum(one.outcomes.total() - one.outcomes["answer"] for one in rounds) > 0, "no kill was felt: no test"
