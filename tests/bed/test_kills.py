"""A short kill matrix on real processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from causeway_server.cloud_pool.cli.triton import ENVIRONMENT

from .bed import running_bed
from .kills import CONFIG, LONG, REPLICAS, TIERS, VICTIMS, run, summary

SEED = 20
MOST_CALLS = 1.4  # of a request: there are few, and a kill interrupts many of them
PLAN = [["triton", "gateway", "device"], ["stub", "worker"], ["tritons", "redis"]]
SENTINEL_PLAN = [["redis", "worker"], ["gateway", "device", "redis"]]


@pytest.mark.triton
@pytest.mark.redis
@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "plan"), [(0, PLAN), (REPLICAS, SENTINEL_PLAN)], ids=["single", "sentinel"])
async def test_killing_every_process_loses_no_job_and_doubles_no_effect(replicas: int, plan: list[list[str]]) -> None:
    """With Sentinels also: a failover that loses data is forced at the end, and `jobs reconcile` names what is gone."""
    if not (Path(os.environ.get("CAUSEWAY_TRITON_ENV", ENVIRONMENT)) / "triton.json").is_file():
        pytest.skip("no Triton environment: `make setup` makes it")
    settings: Any = {"model": "journaled", "speed": LONG, "config": dict(CONFIG), "replicas_of_redis": replicas}
    with running_bed(TIERS, device=True, **settings) as bed:
        rounds, failures = await run(
            bed, plan, SEED, within_s=1.5, streams_per_s=3.0, jobs_per_s=1.0, most_calls=MOST_CALLS
        )
    assert not failures, "\n".join([*failures, summary(rounds)])
    assert all(one.jobs for one in rounds)
    assert sum(one.outcomes["answer"] for one in rounds) > 0  # on a busy machine a round may have none in time
    assert sum(one.outcomes.total() - one.outcomes["answer"] for one in rounds) > 0, "no kill was felt: no test"


def test_the_short_matrix_kills_every_kind_of_process() -> None:
    assert {victim for victims in PLAN for victim in victims} == set(VICTIMS)
