"""Gateways and workers of a pool, upgraded one by one under jobs and batches, taken back, and upgraded again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from pathlib import Path

import aiohttp

from tests.cloud_pool.jobs.webhook_receiver import receiving

from .batch_load import BatchLoad
from .bed import ROOT, running_bed
from .job_load import JobLoad
from .kills import LONG, TIERS

ORDER = ("gateway-1", "worker-1", "gateway-2", "worker-2")
SEED = 7
TOKENS = 60
JOBS_A_STEP = 12
PATIENCE_S = 120.0


async def roll(old: Path, roots: Iterable[Path]) -> dict[str, object]:
    """Start all processes from the source tree `old`, then replace them by those of each of `roots` in turn.

    Jobs and batches are submitted at each step, so that some are in flight. Returns how all of them ended.
    """
    steps = [(name, root) for root in roots for name in ORDER]
    with running_bed(TIERS, model="journaled", speed=LONG, root=old) as bed:
        async with receiving() as receiver, aiohttp.ClientSession() as session:
            token = bed.token("acme")
            jobs = JobLoad(session, bed.urls, token, receiver, random.Random(SEED))
            batches = BatchLoad(session, bed.urls, token, random.Random(SEED))
            for name, root in (*steps, ("", ROOT)):
                async with asyncio.TaskGroup() as tasks:
                    for number in range(JOBS_A_STEP):
                        tasks.create_task(jobs.submit(TIERS[number % len(TIERS)], TOKENS))
                    tasks.create_task(batches.submit(TIERS[0], TOKENS))
                if name:
                    await bed.replace(name, root)
            late = await jobs.wait_for_ends(jobs.accepted, PATIENCE_S)
            assert not late, bed.tails()
            failures = await batches.failures(PATIENCE_S)
            for job in jobs.accepted:
                await jobs.count_ends(job)
    well = [(job.status, job.tokens, job.ends, len(job.ids)) == ("succeeded", TOKENS, 1, 1) for job in jobs.accepted]
    return {
        "jobs": len(well),
        "lost or doubled jobs": well.count(False),
        "batches": len(batches.accepted),
        "faults of batches": failures,
    }
