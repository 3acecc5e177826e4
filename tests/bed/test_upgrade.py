"""A rolling upgrade over a running backlog: the version that introduced the layout of keys beside this one."""

from __future__ import annotations

import asyncio
import io
import os
import random
import subprocess
import zipfile
from pathlib import Path

import aiohttp
import pytest

from causeway_server.cloud_pool.cli.triton import ENVIRONMENT
from causeway_server.cloud_pool.redis.keys import ACCOUNTS_LAYOUT, JOBS_LAYOUT
from tests.cloud_pool.jobs.webhook_receiver import receiving

from .batch_load import BatchLoad
from .bed import ROOT, running_bed
from .job_load import JobLoad
from .kills import LONG, TIERS

SEED = 7
TOKENS = 60
JOBS_A_STEP = 12
PATIENCE_S = 120.0
ORDER = ("gateway-1", "worker-1", "gateway-2", "worker-2")


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, capture_output=True).stdout


def introduced() -> str:
    """Return the first commit with both layouts that this version knows. Skips where the history does not say."""
    if not (ROOT / ".git").exists() or git("rev-parse", "--is-shallow-repository").strip() != b"false":
        pytest.skip(
            "no whole git history here (git fetch --unshallow): test_upgrade of jobs reads frozen records instead"
        )
    firsts = []
    for text in (f"JOBS_LAYOUT: Final = {JOBS_LAYOUT}", f"ACCOUNTS_LAYOUT: Final = {ACCOUNTS_LAYOUT}"):
        commits = git("log", "--reverse", "--format=%H", f"-S{text}", "--", "cloud_pool/redis/keys.py").split()
        if not commits:
            pytest.skip(f"{text!r} is not committed yet")
        firsts.append(commits[0].decode())
    jobs, accounts = firsts
    is_older = subprocess.run(["git", "-C", str(ROOT), "merge-base", "--is-ancestor", jobs, accounts], check=False)
    return accounts if is_older.returncode == 0 else jobs


@pytest.fixture
def old_root(tmp_path: Path) -> Path:
    """The source tree of that commit."""
    root = tmp_path / "old"
    with zipfile.ZipFile(io.BytesIO(git("archive", "--format=zip", introduced()))) as archive:
        archive.extractall(root)
    (root / "causeway-0.dist-info").mkdir()  # the name of the distribution then, whose version its commands look up
    (root / "causeway-0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: causeway\nVersion: 0\n")
    return root


@pytest.mark.triton
@pytest.mark.redis
@pytest.mark.slow
async def test_a_rolling_upgrade_over_a_backlog_loses_and_doubles_nothing(old_root: Path) -> None:
    """After each step old and new gateways accept jobs and batches, which old and new workers run."""
    if not (Path(os.environ.get("CAUSEWAY_TRITON_ENV", ENVIRONMENT)) / "triton.json").is_file():
        pytest.skip("no Triton environment: `make setup` makes it")
    with running_bed(TIERS, model="journaled", speed=LONG, root=old_root) as bed:
        async with receiving() as receiver, aiohttp.ClientSession() as session:
            token = bed.token("acme")
            jobs = JobLoad(session, bed.urls, token, receiver, random.Random(SEED))
            batches = BatchLoad(session, bed.urls, token, random.Random(SEED))
            for name in (*ORDER, ""):
                async with asyncio.TaskGroup() as tasks:
                    for number in range(JOBS_A_STEP):
                        tasks.create_task(jobs.submit(TIERS[number % len(TIERS)], TOKENS))
                    tasks.create_task(batches.submit(TIERS[0], TOKENS))
                if name:
                    await bed.replace(name)
            late = await jobs.wait_for_ends(jobs.accepted, PATIENCE_S)
            assert not late, bed.tails()
            assert await batches.failures(PATIENCE_S) == []
            for job in jobs.accepted:
                await jobs.count_ends(job)
            assert [(job.status, job.tokens, job.ends, len(job.ids)) for job in jobs.accepted] == [
                ("succeeded", TOKENS, 1, 1)
            ] * (JOBS_A_STEP * (len(ORDER) + 1))
