"""Jobs on a master behind Sentinels: a failover loses and doubles nothing that was acknowledged."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

import aiohttp
import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry
from redis.exceptions import RedisError

from causeway_server.cloud_pool.accounts.audit import AuditLog
from causeway_server.cloud_pool.accounts.identity.revocation import DEVICES_KEY
from causeway_server.cloud_pool.app import JobsGateway
from causeway_server.cloud_pool.cli.keys import keys
from causeway_server.cloud_pool.jobs.http.job_api import JobCallers
from causeway_server.cloud_pool.jobs.reconciliation import reconcile
from causeway_server.cloud_pool.redis.connect import open_redis
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.job_store import JobStore
from causeway_server.cloud_pool.storage.record import NewJob
from causeway_server.cloud_pool.storage.redis_client import JobStoreNotReplicated
from causeway_server.cloud_pool.storage.stores import JobStores
from causeway_server.router.errors import JobStoreUnavailable
from causeway_server.router.jobs.job import JobState
from tests.cloud_pool.jobs.gateway import identify, serving
from tests.cloud_pool.jobs.scripted_worker import RunningWorker, ScriptedRunner
from tests.cloud_pool.jobs.test_api import TIER
from tests.redis_deployments import SentinelDeployment, running, wait_until

pytestmark = [pytest.mark.redis, pytest.mark.slow]
PATIENCE_S = 60.0
CHAT = {"model": "large", "messages": [{"role": "user", "content": "a question"}]}


def config_of(deployment: SentinelDeployment, **changes: object) -> JobsConfig:
    quick: dict[str, object] = {"lease_check_s": 0.02, "reclaim_interval_s": 0.02, "lease_s": 1.0, "backoff_s": 0.001}
    quick["redis"] = deployment.url
    return JobsConfig(**(quick | changes))  # type: ignore[arg-type]


def job(number: int, **changes: object) -> NewJob:
    fields = {
        "id": f"job_{number}",
        "owner": "acme/kiosk",
        "tier": "large",
        "priority": "standard",
        "endpoint": "/v1/chat/completions",
        "body": b'{"model":"large","messages":[{"role":"user","content":"a question"}]}',
        "deadline_ms": int(time.time() * 1000) + 3_600_000,
        "idempotency": f"key{number}",
        "digest": "d",
    }
    return NewJob(**(fields | changes))  # type: ignore[arg-type]


@pytest.fixture
async def stores(sentinels: SentinelDeployment) -> AsyncIterator[JobStores]:
    stores = JobStores.open(config_of(sentinels))
    yield stores
    await stores.close()


async def accept(store: JobStore, new: NewJob) -> str:
    """Send a job until it is accepted, as a client does that gets 503."""
    ends = time.monotonic() + PATIENCE_S
    while True:
        try:
            return (await store.accept(new)).id
        except JobStoreUnavailable:
            assert time.monotonic() < ends
        await asyncio.sleep(0.05)


async def until_ended(stores: JobStores, name: str) -> None:
    """Wait until a job has succeeded."""
    ends = time.monotonic() + PATIENCE_S
    while (record := await stores.jobs.lookup(name)) is None or not record.ended:
        assert time.monotonic() < ends, record
        await asyncio.sleep(0.02)
    assert record.state is JobState.SUCCEEDED


async def test_a_failover_loses_no_acknowledged_job_and_each_ends_once(
    sentinels: SentinelDeployment, stores: JobStores
) -> None:
    """The master is killed amid submissions and runs. A job with the same key gets the same id afterwards."""
    config = config_of(sentinels)
    accepted: list[str] = []

    async def submit() -> None:
        for number in range(120):
            name = await accept(stores.jobs, job(number))
            accepted.append(name)

    runner = ScriptedRunner()
    async with RunningWorker(stores.jobs, runner, config):
        submitting = asyncio.ensure_future(submit())
        while len(accepted) < 40:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        old = await asyncio.to_thread(sentinels.fail_over)
        await asyncio.to_thread(
            sentinels.rejoin, old
        )  # its supervisor restarts it; without a replica no job is accepted
        await asyncio.wait_for(submitting, PATIENCE_S)
        for name in accepted:
            await until_ended(stores, name)
    assert len(set(accepted)) == 120
    for number in range(0, 120, 10):
        again = await stores.jobs.accept(job(number, id=f"job_other_{number}"))
        assert (again.id, again.known) == (f"job_{number}", True)


async def test_without_a_confirming_replica_a_job_is_not_acknowledged_and_keeps_its_id(
    sentinels: SentinelDeployment, stores: JobStores
) -> None:
    """Also a repetition waits for the replica, although it writes nothing."""
    await stores.jobs.accept(job(1))
    (replica,) = sentinels.replicas
    with replica.paused():
        for _ in range(2):
            with pytest.raises(JobStoreNotReplicated, match=r"0 of 1 replicas.*same Idempotency-Key") as raised:
                await stores.jobs.accept(job(2))
            assert (raised.value.status, raised.value.code) == (503, "job_store_not_replicated")
    again = await accept(stores.jobs, job(2, id="job_other"))
    assert again == "job_2"
    await asyncio.to_thread(lambda: sentinels.rejoin(sentinels.fail_over()))
    assert await accept(stores.jobs, job(2, id="job_another")) == "job_2"


async def test_the_number_of_replicas_and_the_time_are_configured(sentinels: SentinelDeployment) -> None:
    none = JobStores.open(config_of(sentinels, replicas=0))
    two = JobStores.open(config_of(sentinels, replicas=2, replica_timeout_s=0.05))
    try:
        (replica,) = sentinels.replicas
        with replica.paused():
            assert (await none.jobs.accept(job(1))).id == "job_1"
        with pytest.raises(JobStoreNotReplicated, match=r"of 2 replicas confirmed the write in 0.05 s"):
            await two.jobs.accept(job(2))
    finally:
        await none.close()
        await two.close()


@pytest.fixture
def two_replicas(tmp_path: Path) -> Iterator[SentinelDeployment]:
    with running(SentinelDeployment(tmp_path, replicas=2)) as deployment:
        yield deployment


async def test_the_confirmation_of_one_of_two_replicas_is_not_enough(two_replicas: SentinelDeployment) -> None:
    """The Sentinels promote one while the master goes on after it hung: the other one still confirms what is lost."""
    two_replicas.stop_asking_servers()
    stores = JobStores.open(config_of(two_replicas, replica_timeout_s=0.05))
    promoted, other = two_replicas.replicas
    with promoted.client() as client:
        client.replicaof("NO", "ONE")
    with pytest.raises(JobStoreNotReplicated, match="of 2 replicas"):
        await stores.jobs.accept(job(1))
    record = stores.database.key("job", "job_1")
    with other.client() as client:
        await asyncio.to_thread(wait_until, lambda: client.exists(record), "the other replica does not have it")
    with promoted.client() as client:
        assert not client.exists(record)
    await stores.close()


async def test_a_replica_that_is_down_or_a_silent_sentinel_delays_no_acceptance_for_long(
    two_replicas: SentinelDeployment,
) -> None:
    stores = JobStores.open(config_of(two_replicas))
    lost, _ = two_replicas.replicas
    assert await accept(stores.jobs, job(1)) == "job_1"
    lost.kill()
    assert await accept(stores.jobs, job(2)) == "job_2"
    two_replicas.kill_sentinels()
    assert await accept(stores.jobs, job(3)) == "job_3"
    unaware = JobStores.open(config_of(two_replicas))
    with pytest.raises(JobStoreUnavailable):
        await unaware.jobs.accept(job(4))
    for each in (stores, unaware):
        await each.close()


async def test_a_sentinel_that_names_a_replica_is_not_believed(
    sentinels: SentinelDeployment, stores: JobStores
) -> None:
    """During a failover it may: a read would miss what the new master has accepted."""
    await stores.jobs.accept(job(1))
    misled = JobStores.open(config_of(sentinels, redis=await asyncio.to_thread(sentinels.start_stale_sentinel)))
    with pytest.raises(JobStoreUnavailable):
        await misled.jobs.lookup("job_absent")
    await misled.close()


async def test_accounts_follow_the_master(sentinels: SentinelDeployment) -> None:
    async with open_redis(sentinels.url) as client:
        await client.set("here", "1")
        assert await client.wait(1, 60_000) == 1
        await asyncio.to_thread(sentinels.fail_over)
        while True:
            with suppress(RedisError):  # connections to the old master
                assert await asyncio.wait_for(client.get("here"), PATIENCE_S) == b"1"
                assert await client.set("there", "2")
                break


def test_a_revocation_waits_for_a_replica(sentinels: SentinelDeployment, tmp_path: Path) -> None:
    """As an accepted job does; without a confirmation the command fails."""
    config = tmp_path / "gateway.yaml"
    for timeout_s, is_confirmed in ((4.0, True), (0.05, False)):
        config.write_text(f"redis: {sentinels.url}\njobs: {{replica_timeout_s: {timeout_s}}}\n")
        arguments = ["revoke", "--config", str(config), "--device", "acme/kiosk"]
        with nullcontext() if is_confirmed else sentinels.replicas[0].paused():
            result = CliRunner().invoke(keys, arguments)
        assert (result.exit_code == 0) == is_confirmed, result.output
    assert "confirmed it in 0.05 s" in result.output
    with sentinels.master.client() as client:
        assert client.hexists(DEVICES_KEY, "acme/kiosk")


async def test_reconcile_names_what_a_forced_lossy_failover_lost(tmp_path: Path) -> None:
    """The only replica that confirmed is lost together with the master, and a stale one is promoted."""
    (tmp_path / "redis").mkdir()
    audit = AuditLog(str(tmp_path / "audit"))
    audit.start()
    with running(SentinelDeployment(tmp_path / "redis", replicas=2)) as deployment:
        config = config_of(deployment)
        gateway = JobsGateway(config, {"large": TIER}, JobCallers(identify), CollectorRegistry(), audit=audit)
        headers = {"authorization": "Bearer acme"}
        async with serving(gateway.api.handler) as url, aiohttp.ClientSession(url, headers=headers) as http:
            kept = [await submit(http) for _ in range(5)]
            with deployment.master.client() as master:
                master.set("test", "both replicas have it")
                assert master.wait(2, 60_000) == 2
            laggard = deployment.replicas[0]
            laggard.kill()
            lost = [await submit(http) for _ in range(7)]  # once the Sentinels have noticed
            for server in await asyncio.to_thread(deployment.fail_over_to, laggard):
                await asyncio.to_thread(deployment.rejoin, server)
            stores = JobStores.open(config)
            for name in kept:
                assert await stores.jobs.lookup(name) is not None
            found = await reconcile(stores.database, config, [tmp_path / "audit"])
            await stores.close()
        await gateway.close()
    audit.close()
    assert [each.id for each in found.lost] == lost
    assert {each.tenant for each in found.lost} == {"acme"}


async def submit(http: aiohttp.ClientSession) -> str:
    """Send a job until it is accepted."""
    key, ends = {"idempotency-key": uuid.uuid4().hex}, time.monotonic() + PATIENCE_S
    while True:
        async with http.post("/v1/jobs", json=CHAT, headers=key) as response:
            if response.status == 202:
                return str((await response.json())["id"])
            assert response.status == 503, await response.text()
        assert time.monotonic() < ends
