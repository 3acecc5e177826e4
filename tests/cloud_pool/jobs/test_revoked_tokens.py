"""A job whose token, or whose device, was revoked while it waited does not run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest_asyncio
import redis.asyncio

from causeway_server.cloud_pool.accounts.identity.config import IdentityConfig
from causeway_server.cloud_pool.accounts.identity.revocation import RevocationList, revoke_device, revoke_token
from causeway_server.cloud_pool.accounts.tenants.config import TenantsConfig
from causeway_server.cloud_pool.jobs.worker.runner import MeteredRunner
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.job_store import JobStore
from causeway_server.cloud_pool.storage.record import NewJob
from causeway_server.router.jobs.job import JobState

from .conftest import until
from .redis_server import RedisServer
from .scripted_worker import RunningWorker, ScriptedRunner
from .test_admin_and_accounting import AuditedLedger

NOW = 1_800_000_000.0
ISSUED = NOW - 100.0


@pytest_asyncio.fixture
async def revocations(redis_server: RedisServer) -> AsyncIterator[RevocationList]:
    async with redis.asyncio.Redis.from_url(redis_server.url) as client:
        await revoke_token(client, "stolen", NOW + 3600, NOW)
        await revoke_device(client, "acme/lost", NOW)
        revoked = RevocationList(IdentityConfig(), client, wall_clock=lambda: NOW)
        await revoked.refresh()
        yield revoked
        await client.flushall()


async def test_queued_jobs_of_revoked_tokens_and_devices_end_cancelled_with_the_reason(
    store: JobStore, config: JobsConfig, new_job: Callable[..., NewJob], revocations: RevocationList, tmp_path: Path
) -> None:
    """A device that got a new token since then, other devices, and static tokens run."""
    books = AuditedLedger(tmp_path, TenantsConfig())
    books.audit.start()
    scripted = ScriptedRunner()
    jobs = {
        "device": new_job(owner="acme/lost", token_id="one", token_issued=ISSUED),
        "token": new_job(owner="acme/kiosk", token_id="stolen", token_issued=ISSUED),
        "new token": new_job(owner="acme/lost", token_id="two", token_issued=NOW + 1),
        "other": new_job(owner="acme/kiosk", token_id="three", token_issued=ISSUED),
        "static": new_job(owner="acme/lost"),
    }
    for job in jobs.values():
        await store.accept(job)

    async def done() -> bool:
        return all([(await store.get(job.id, job.owner)).ended for job in jobs.values()])

    runner = MeteredRunner(scripted, books.ledger, revocations=revocations)
    async with RunningWorker(store, runner, config) as worker:
        await until(done)
    records = {name: await store.get(job.id, job.owner) for name, job in jobs.items()}
    assert {name: record.state for name, record in records.items()} == {
        "device": JobState.CANCELLED,
        "token": JobState.CANCELLED,
        "new token": JobState.SUCCEEDED,
        "other": JobState.SUCCEEDED,
        "static": JobState.SUCCEEDED,
    }
    error = msgspec.json.decode(records["device"].error)
    assert error["code"] == "token_revoked"
    assert "device's tokens have been revoked" in error["message"]
    ran = {run.record.id for run in scripted.runs}
    assert ran == {job.id for name, job in jobs.items() if name not in ("device", "token")}
    assert worker.count("cancelled") == 2
    outcomes = {row["id"]: (row["outcome"], row["pico_usd"]) for row in books.records()}
    assert outcomes[jobs["device"].id] == ("token_revoked", 0)


async def test_a_stale_copy_postpones_jobs_where_it_denies_requests(
    store: JobStore, config: JobsConfig, new_job: Callable[..., NewJob], tmp_path: Path
) -> None:
    """The job has not run, and loses no attempt."""
    unreachable = redis.asyncio.Redis.from_url("redis://127.0.0.1:1/0", retry=None)
    closed = RevocationList(IdentityConfig(when_revocations_stale="deny"), unreachable)
    books = AuditedLedger(tmp_path, TenantsConfig())
    job = new_job(owner="acme/kiosk", token_id="one", token_issued=ISSUED)
    await store.accept(job)
    scripted = ScriptedRunner()

    async def waits() -> bool:
        return (await store.get(job.id, job.owner)).postponed > 0

    async with RunningWorker(store, MeteredRunner(scripted, books.ledger, revocations=closed), config):
        await until(waits)
    assert not scripted.runs
    await unreachable.aclose()
