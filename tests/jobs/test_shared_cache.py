"""Jobs and the cache that gateways share: one question is answered once, whether it came as a job or not."""

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

from cloud_pool.accounts.tenants.config import TenantsConfig
from cloud_pool.cache.config import CacheConfig
from cloud_pool.jobs.config import JobsConfig
from cloud_pool.jobs.gateway import JobsGateway
from cloud_pool.jobs.record import JobRecord, NewJob
from cloud_pool.jobs.states import JobState
from cloud_pool.jobs.store.job_store import JobStore
from cloud_pool.jobs.store.redis_client import RedisClient
from cloud_pool.jobs.worker.metered_runner import MeteredRunner
from cloud_pool.jobs.worker.runner import ServiceBackend
from tests.cloud_cache.gateways import TIERS, Gateway, ask, gateway

from .conftest import Clock, until
from .gateway import serving, who
from .scripted_worker import Shift
from .test_admin_and_accounting import Books
from .test_batches import AtWork

MakeOffer = Callable[..., NewJob]
_prefixes = itertools.count()


def body(text: str = "wake me up", **changes: object) -> dict[str, object]:
    """What tests.cloud_cache asks, as a job's body."""
    plain = {"model": "large", "messages": [{"role": "user", "content": text}], "temperature": 0}
    return plain | changes


@pytest.fixture
def offer(offer: MakeOffer) -> MakeOffer:
    return lambda **changes: offer(**{"body": msgspec.json.encode(body()), **changes})


class Bed:
    """A gateway's cache and service, and a worker's beside it: both on one Redis."""

    def __init__(self, here: Gateway, worker: Gateway, store: JobStore, config: JobsConfig, books: Books) -> None:
        self.here = here
        self.worker = worker
        self.store = store
        self.books = books
        self.runner = MeteredRunner(ServiceBackend(worker.caching_service, TIERS, {}), books.ledger)
        self._config = config

    async def done(self, *offers: NewJob) -> list[JobRecord]:
        """What became of these, run together."""
        jobs = [(await self.store.accept(one)).id for one in offers]

        async def all_over() -> bool:
            return all([(await self.store.lookup(job)).ended for job in jobs])  # type: ignore[union-attr]

        async with Shift(self.store, self.runner, self._config):  # type: ignore[arg-type]
            await until(all_over)
        found = [await self.store.lookup(job) for job in jobs]
        assert [one.state for one in found if one] == [JobState.SUCCEEDED] * len(jobs)
        return [one for one in found if one]

    async def answer(self, record: JobRecord) -> dict[str, object]:
        return json.loads(await self.store.read_result(record.id))  # type: ignore[no-any-return]


@pytest_asyncio.fixture
async def bed(config: JobsConfig, store: JobStore, tmp_path: Path) -> AsyncIterator[Bed]:
    settings = CacheConfig(enabled=True, key_prefix=f"j{next(_prefixes)}", redis_timeout_s=5.0, lease_s=0.06)
    books = Books(tmp_path, TenantsConfig())
    books.audit.start()
    async with (
        gateway(config.redis, settings, lambda: -1) as here,
        gateway(config.redis, settings, lambda: -1) as worker,
    ):
        for one in (here, worker):
            one.script.permit(1000)
        yield Bed(here, worker, store, config, books)


async def test_a_job_gets_what_an_interactive_request_left(bed: Bed, offer: MakeOffer) -> None:
    """Nothing is made: the record says hit, the usage says that all of the prompt was found, and it costs no tokens."""
    asked = await bed.here.ask(ask(), tenant="kiosk").end()
    (record,) = await bed.done(offer())
    found = await bed.answer(record)
    assert found["choices"][0]["message"]["content"] == asked.text == "one two three"  # type: ignore[index]
    assert found["usage"]["prompt_tokens_details"] == {"cached_tokens": 20}  # type: ignore[index]
    assert record.cache == "hit"
    assert not bed.worker.script.asked
    (row,) = bed.books.records()
    assert (row["route"], row["cache"], row["outcome"]) == ("job", "hit", "ok")
    assert (row["prompt_tokens"], row["completion_tokens"]) == (0, 0)


async def test_a_jobs_answer_is_kept(bed: Bed, offer: MakeOffer) -> None:
    """The next who asks the same, interactively, gets it from the cache; the job pays for what was made."""
    (record,) = await bed.done(offer())
    assert record.cache == "miss"
    asked = await bed.here.ask(ask(), tenant="kiosk").end()
    assert asked.headers["x-causeway-cache"] == "hit"
    assert (asked.text, bed.here.script.asked) == ("one two three", [])
    (row,) = bed.books.records()
    assert (row["cache"], row["prompt_tokens"], row["completion_tokens"]) == ("miss", 20, 3)


async def test_the_same_jobs_at_once_are_one_answer(bed: Bed, offer: MakeOffer) -> None:
    """It is made once, and paid for once."""
    records = await bed.done(*(offer() for _ in range(4)))
    assert len(bed.worker.script.asked) == 1
    assert [one.cache for one in records].count("miss") == 1
    assert {one.cache for one in records} <= {"miss", "hit", "coalesced"}
    rows = bed.books.records()
    assert sum(int(str(row["completion_tokens"])) for row in rows) == 3


async def test_no_answer_crosses_tenants(bed: Bed, offer: MakeOffer) -> None:
    """The owner's tenant counts: its devices share, others do not."""
    await bed.here.ask(ask(), tenant="acme").end()
    other, mine = await bed.done(offer(owner="other/1"), offer(owner="acme/7"))
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
async def test_what_is_kept_out_is_kept_out_both_ways(bed: Bed, offer: MakeOffer, changes: dict[str, object]) -> None:
    """It neither gets a kept answer nor leaves one."""
    (record,) = await bed.done(offer(**changes))
    assert record.cache == "bypass"
    asked = await bed.here.ask(ask(), tenant="kiosk").end()
    assert asked.headers["x-causeway-cache"] == "miss"
    (again,) = await bed.done(offer(**changes))
    assert again.cache == "bypass"
    assert len(bed.worker.script.asked) == 2


async def test_a_cache_that_is_away_costs_nothing_but_the_sharing(bed: Bed, offer: MakeOffer) -> None:
    """The job is answered all the same."""
    bed.worker.cache.store.suspend(math.inf)
    (record,) = await bed.done(offer())
    assert record.cache == "miss"
    assert (await bed.answer(record))["choices"][0]["message"]["content"] == "one two three"  # type: ignore[index]


async def test_headers_travel_with_the_job(
    config: JobsConfig, store: JobStore, database: RedisClient, clock: Clock
) -> None:
    """`Cache-Control: no-store` and tags of the POST hold when the job runs, and its owner reads what the cache did."""
    gateway = JobsGateway(config, TIERS, who, CollectorRegistry(), clock=clock)
    try:
        async with (
            serving(gateway.api.handler) as url,
            aiohttp.ClientSession(url, headers={"authorization": "Bearer a"}) as http,
        ):
            said = {"cache-control": "no-store", "x-causeway-tags": "night,till", "idempotency-key": "k"}
            async with http.post("/v1/jobs", json=body(), headers=said) as response:
                job = await response.json()
                assert (response.status, job["cache"]) == (202, None)
            async with http.post("/v1/jobs", json=body(), headers={"idempotency-key": "k"}) as response:
                assert response.status == 409  # not the same ask
            (record,) = (await store.claim("w", "large", ["standard"])).records
            assert record.tag_list == ("night", "no-store", "till")
            await store.succeed(record.id, record.fence, b"{}", "coalesced")
            async with http.get(f"/v1/jobs/{job['id']}") as response:
                assert (await response.json())["cache"] == "coalesced"
    finally:
        await gateway.close()


async def test_a_batchs_headers_hold_for_its_lines(config: JobsConfig, clock: Clock, bed: Bed) -> None:
    """`Cache-Control: no-store` on the batch keeps each of its lines out of the cache."""
    gateway = JobsGateway(config, TIERS, who, CollectorRegistry(), clock=clock)
    row = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body()}
    try:
        async with serving(gateway.api.handler) as url:
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="kiosk", max_retries=0)
            for said, asked in (({"cache-control": "no-store"}, 1), ({}, 2), ({}, 2)):
                file = await client.files.create(file=("in.jsonl", json.dumps(row).encode()), purpose="batch")
                batch = await client.batches.create(
                    input_file_id=file.id,
                    endpoint="/v1/chat/completions",
                    completion_window="24h",
                    extra_headers=said,
                )

                async def is_done(name: str = batch.id) -> bool:
                    return (await client.batches.retrieve(name)).status == "completed"

                async with AtWork(config, clock, bed.runner):  # type: ignore[arg-type]
                    await until(is_done)
                assert len(bed.worker.script.asked) == asked
            await client.close()
    finally:
        await gateway.close()
