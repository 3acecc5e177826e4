"""Jobs and the shared cache: one answer for equal requests, whether or not they are jobs."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import msgspec
import openai
import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from causeway_server.cloud_pool.accounts.tenants.config import TenantsConfig
from causeway_server.cloud_pool.app import JobsGateway
from causeway_server.cloud_pool.cache.config import CacheConfig
from causeway_server.cloud_pool.jobs.http.job_api import JobCallers
from causeway_server.cloud_pool.jobs.worker.runner import MeteredRunner, ServiceBackend
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.job_store import JobStore
from causeway_server.cloud_pool.storage.record import JobRecord, NewJob
from causeway_server.cloud_pool.storage.redis_client import RedisClient
from causeway_server.router.jobs.job import JobState
from tests.cloud_pool.batches.test_batches import RunningRuntime
from tests.cloud_pool.cache.gateways import TIERS, Gateway, ask, gateway

from .conftest import Clock, until
from .gateway import identify, serving
from .scripted_worker import RunningWorker, no_vectors
from .test_admin_and_accounting import AuditedLedger

MakeJob = Callable[..., NewJob]
_prefixes = itertools.count()


def body(text: str = "wake me up", **changes: object) -> dict[str, object]:
    """A job's body with the request of tests.cloud_pool.cache."""
    plain = {"model": "large", "messages": [{"role": "user", "content": text}], "temperature": 0}
    return plain | changes


@pytest.fixture
def new_job(new_job: MakeJob) -> MakeJob:
    return lambda **changes: new_job(**{"body": msgspec.json.encode(body()), **changes})


class SharedDeployment:
    """A gateway's cache and service and a worker's, on one Redis."""

    def __init__(
        self, gateway: Gateway, worker: Gateway, store: JobStore, config: JobsConfig, ledger: AuditedLedger
    ) -> None:
        self.gateway = gateway
        self.worker = worker
        self.store = store
        self.ledger = ledger
        self.runner = MeteredRunner(ServiceBackend(worker.caching_service, no_vectors, TIERS, {}), ledger.ledger)
        self._config = config

    async def outcomes(self, *offers: NewJob) -> list[JobRecord]:
        """The records of these jobs after they have run together."""
        jobs = [(await self.store.accept(one)).id for one in offers]

        async def all_over() -> bool:
            return all([(await self.store.lookup(job)).ended for job in jobs])  # type: ignore[union-attr]

        async with RunningWorker(self.store, self.runner, self._config):
            await until(all_over)
        found = [await self.store.lookup(job) for job in jobs]
        assert [one.state for one in found if one] == [JobState.SUCCEEDED] * len(jobs)
        return [one for one in found if one]

    async def answer(self, record: JobRecord) -> dict[str, object]:
        return json.loads(await self.store.read_result(record.id, record.owner))


@pytest_asyncio.fixture
async def bed(config: JobsConfig, store: JobStore, tmp_path: Path) -> AsyncIterator[SharedDeployment]:
    settings = CacheConfig(enabled=True, key_prefix=f"j{next(_prefixes)}", redis_timeout_s=5.0, lease_s=0.06)
    ledger = AuditedLedger(tmp_path, TenantsConfig())
    ledger.audit.start()
    async with (
        gateway(str(config.redis), settings, lambda: -1) as here,
        gateway(str(config.redis), settings, lambda: -1) as worker,
    ):
        for one in (here, worker):
            one.script.permit(1000)
        yield SharedDeployment(here, worker, store, config, ledger)


async def test_a_job_gets_an_interactive_requests_answer(bed: SharedDeployment, new_job: MakeJob) -> None:
    """The record says hit, the whole prompt is cached, and the job costs no tokens."""
    answer = await bed.gateway.ask(ask(), tenant="kiosk").end()
    (record,) = await bed.outcomes(new_job())
    found = await bed.answer(record)
    assert found["choices"][0]["message"]["content"] == answer.text == "one two three"  # type: ignore[index]
    assert found["usage"]["prompt_tokens_details"] == {"cached_tokens": 20}  # type: ignore[index]
    assert record.cache == "hit"
    assert not bed.worker.script.requests
    (row,) = bed.ledger.records()
    assert (row["route"], row["cache"], row["outcome"]) == ("job", "hit", "ok")
    assert (row["prompt_tokens"], row["completion_tokens"]) == (0, 0)


async def test_an_interactive_request_gets_a_jobs_answer(bed: SharedDeployment, new_job: MakeJob) -> None:
    """The job pays for the tokens."""
    (record,) = await bed.outcomes(new_job())
    assert record.cache == "miss"
    answer = await bed.gateway.ask(ask(), tenant="kiosk").end()
    assert answer.headers["x-causeway-cache"] == "hit"
    assert (answer.text, bed.gateway.script.requests) == ("one two three", [])
    (row,) = bed.ledger.records()
    assert (row["cache"], row["prompt_tokens"], row["completion_tokens"]) == ("miss", 20, 3)


async def test_concurrent_equal_jobs_share_one_generation(bed: SharedDeployment, new_job: MakeJob) -> None:
    records = await bed.outcomes(*(new_job() for _ in range(4)))
    assert len(bed.worker.script.requests) == 1
    assert [one.cache for one in records].count("miss") == 1
    assert {one.cache for one in records} <= {"miss", "hit", "coalesced"}
    rows = bed.ledger.records()
    assert sum(int(str(row["completion_tokens"])) for row in rows) == 3


async def test_no_answer_crosses_tenants(bed: SharedDeployment, new_job: MakeJob) -> None:
    """Devices of a tenant share answers."""
    await bed.gateway.ask(ask(), tenant="acme").end()
    other, mine = await bed.outcomes(new_job(owner="other/1"), new_job(owner="acme/7"))
    assert (other.cache, mine.cache) == ("miss", "hit")


@pytest.mark.parametrize(
    "changes",
    [
        {"tags": ("no-store",)},
        {"tags": ("private",)},
        {"body": msgspec.json.encode(body(causeway={"tags": ["private"]}))},
        {"body": msgspec.json.encode(body(temperature=1.0))},
    ],
    ids=["no-store", "private", "private in the body", "sampled"],
)
async def test_a_job_outside_the_cache_neither_reads_nor_writes_it(
    bed: SharedDeployment, new_job: MakeJob, changes: dict[str, object]
) -> None:
    (record,) = await bed.outcomes(new_job(**changes))
    assert record.cache == "bypass"
    answer = await bed.gateway.ask(ask(), tenant="kiosk").end()
    assert answer.headers["x-causeway-cache"] == "miss"
    (again,) = await bed.outcomes(new_job(**changes))
    assert again.cache == "bypass"
    assert len(bed.worker.script.requests) == 2


async def test_a_job_is_answered_without_the_cache(bed: SharedDeployment, new_job: MakeJob) -> None:
    bed.worker.cache.store.suspend(math.inf)
    (record,) = await bed.outcomes(new_job())
    assert record.cache == "miss"
    assert (await bed.answer(record))["choices"][0]["message"]["content"] == "one two three"  # type: ignore[index]


async def test_a_submissions_headers_apply_when_the_job_runs(
    config: JobsConfig, store: JobStore, database: RedisClient, clock: Clock
) -> None:
    gateway = JobsGateway(config, TIERS, JobCallers(identify), CollectorRegistry(), clock=clock)
    try:
        async with (
            serving(gateway.api.handler) as url,
            aiohttp.ClientSession(url, headers={"authorization": "Bearer a"}) as http,
        ):
            headers = {"cache-control": "no-store", "x-causeway-tags": "night,till", "idempotency-key": "k"}
            async with http.post("/v1/jobs", json=body(), headers=headers) as response:
                job = await response.json()
                assert (response.status, job["cache"]) == (202, None)
            async with http.post("/v1/jobs", json=body(), headers={"idempotency-key": "k"}) as response:
                assert response.status == 409  # another request
            (record,) = (await store.claim("w", "large", ["standard"])).records
            assert record.tag_list == ("night", "no-store", "till")
            await store.succeed(record.id, record.fence, b"{}", "coalesced")
            async with http.get(f"/v1/jobs/{job['id']}") as response:
                assert (await response.json())["cache"] == "coalesced"
    finally:
        await gateway.close()


async def test_a_batchs_headers_apply_to_its_lines(config: JobsConfig, clock: Clock, bed: SharedDeployment) -> None:
    gateway = JobsGateway(config, TIERS, JobCallers(identify), CollectorRegistry(), clock=clock)
    row = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body()}
    try:
        async with serving(gateway.api.handler) as url:
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="kiosk", max_retries=0)
            private = {"x-causeway-tags": "Private"}  # of the upload
            turns: tuple[tuple[dict[str, str], dict[str, str], int], ...]
            turns = (({}, {"cache-control": "no-store"}, 1), (private, {}, 2), ({}, {}, 3), ({}, {}, 3))
            for sent, headers, generations in turns:
                file = await client.files.create(
                    file=("in.jsonl", json.dumps(row).encode()), purpose="batch", extra_headers=sent
                )
                batch = await client.batches.create(
                    input_file_id=file.id,
                    endpoint="/v1/chat/completions",
                    completion_window="24h",
                    extra_headers=headers,
                )

                async def is_done(name: str = batch.id) -> bool:
                    return (await client.batches.retrieve(name)).status == "completed"

                async with RunningRuntime(config, clock, bed.runner):  # type: ignore[arg-type]
                    await until(is_done)
                assert len(bed.worker.script.requests) == generations
            await client.close()
    finally:
        await gateway.close()
