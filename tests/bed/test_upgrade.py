"""A rolling upgrade over a running backlog: the version that introduced the layout of keys beside this one."""

from __future__ import annotations

import io
import os
import subprocess
import zipfile
from pathlib import Path

import pytest

from causeway_server.cloud_pool.cli.triton import ENVIRONMENT
from causeway_server.cloud_pool.redis.keys import ACCOUNTS_LAYOUT, JOBS_LAYOUT

from .bed import ROOT
from .upgraded_gateways import JOBS_A_STEP, ORDER, roll


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
    found = await roll(old_root, [ROOT])
    assert (found["lost or doubled jobs"], found["faults of batches"]) == (0, [])
    assert found["jobs"] == JOBS_A_STEP * (len(ORDER) + 1)
