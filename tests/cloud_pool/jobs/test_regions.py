"""Jobs, batches and files that are bound to regions: what is stored where, webhooks, traces, messages and workers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import anyio
import anyio.lowlevel
import msgspec
import pytest
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import CollectorRegistry

from causeway_server.cloud_pool.accounts.identity.config import IdentityConfig
from causeway_server.cloud_pool.accounts.tenants.config import TenantLimits
from causeway_server.cloud_pool.app import JobsGateway
from causeway_server.cloud_pool.background import Background
from causeway_server.cloud_pool.brokers.port import IncomingMessage
from causeway_server.cloud_pool.config import Config
from causeway_server.cloud_pool.core.principal import Principal
from causeway_server.cloud_pool.jobs.http.job_api import JobCallers
from causeway_server.cloud_pool.jobs.submission import SubmissionParser
from causeway_server.cloud_pool.jobs.worker.execution import classify_failure
from causeway_server.cloud_pool.observability.tracing import JobTrace
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.stores import JobStores
from causeway_server.cloud_pool.streams.attempts import MessageCallers, MessageRunner
from causeway_server.cloud_pool.streams.config import StreamsConfig
from causeway_server.cloud_pool.streams.metrics import StreamMetrics
from causeway_server.cloud_pool.streams.outcome import read_message
from causeway_server.router.errors import ConfigError, OutsideRegion

from ..streams.pipelines import ActingRunner, encoded
from .conftest import Clock
from .gateway import identify, serving
from .test_api import TIER

CHAT = {"model": "large", "messages": [{"role": "user", "content": "a question"}]}
TIERS = {
    "large": msgspec.structs.replace(TIER, config=msgspec.structs.replace(TIER.config, region="eu")),
    "far": msgspec.structs.replace(TIER, config=msgspec.structs.replace(TIER.config, name="far", region="us")),
}
EU, US = "in-region:eu", "in-region:us"
LIMITS = {"acme-eu": TenantLimits(regions=("EU",)), "acme-us": TenantLimits(regions=("us",))}
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def limits(principal: Principal) -> TenantLimits:
    return LIMITS.get(principal.tenant, TenantLimits())


@asynccontextmanager
async def jobs_in(
    config: JobsConfig, clock: Clock, region: str = "eu", store: str = "eu", trace: JobTrace | None = None
) -> AsyncIterator[str]:
    """A gateway in `region` whose store is in `store`."""
    config = msgspec.structs.replace(
        config,
        region=store,
        webhooks=msgspec.structs.replace(config.webhooks, regions={"hooks.example.eu": "eu", "hooks.example": "us"}),
    )
    callers = JobCallers(identify, limits, region=region)
    gateway = JobsGateway(config, TIERS, callers, CollectorRegistry(), trace=trace, clock=clock)
    async with serving(gateway.api.handler) as url:
        yield url
    await gateway.close()


async def send(
    url: str, method: str, path: str, body: object = None, *, token: str = "acme", tags: str = "", **headers: str
) -> tuple[int, dict[str, Any]]:
    sent = {"authorization": f"Bearer {token}", **headers, **({"x-causeway-tags": tags} if tags else {})}
    more: dict[str, Any] = {"data" if isinstance(body, aiohttp.FormData) else "json": body}
    async with aiohttp.ClientSession(url) as http, http.request(method, path, headers=sent, **more) as response:
        return response.status, await response.json()


def file_form() -> aiohttp.FormData:
    form = aiohttp.FormData()
    form.add_field("purpose", "user_data")
    form.add_field("file", b"a note", filename="note.txt")
    return form


@pytest.mark.parametrize("how", [{"tags": EU}, {"token": "acme-eu"}], ids=["tag", "tenant"])
async def test_an_accepted_job_keeps_its_regions_for_its_run(
    config: JobsConfig, clock: Clock, stores: JobStores, how: Mapping[str, Any]
) -> None:
    async with jobs_in(config, clock) as url:
        status, job = await send(url, "POST", "/v1/jobs", CHAT, **how)
        assert status == 202
        (record,) = (await stores.jobs.claim("w", "large", ["standard"])).records
        assert (record.id, record.tag_list) == (job["id"], (EU,))
        status, file = await send(url, "POST", "/v1/files", file_form(), **how)
        assert status == 200
        assert (await stores.files.get(str(file["id"]), record.owner)).tags == EU


@pytest.mark.parametrize(
    ("places", "body", "how", "words"),
    [
        ({"region": "us"}, {}, {"tags": EU}, "this gateway (identity.region) is in us"),
        ({"region": ""}, {}, {"token": "acme-eu"}, "this gateway (identity.region) is in no configured region"),
        ({"store": "us"}, {}, {"tags": EU}, "the store of jobs and files (jobs.region) is in us"),
        ({"store": ""}, {}, {"token": "acme-eu"}, "(jobs.region) is in no configured region"),
        ({}, {"model": "far"}, {"tags": EU}, "the tier far (tiers.region) is in us"),
        ({}, {"causeway": {"tags": [US]}}, {"tags": EU}, "bound to no region, as its bindings exclude each other"),
        ({}, {"webhook": "https://hooks.example/a"}, {"tags": EU}, "the receiver hooks.example of the webhook"),
        ({}, {"webhook": "https://other.example/a"}, {"token": "acme-eu"}, "is in no configured region"),
    ],
)
async def test_a_job_that_needs_a_place_outside_is_refused_and_not_stored(
    config: JobsConfig,
    clock: Clock,
    stores: JobStores,
    places: dict[str, Any],
    body: dict[str, object],
    how: dict[str, str],
    words: str,
) -> None:
    async with jobs_in(config, clock, **places) as url:
        status, answer = await send(url, "POST", "/v1/jobs", {**CHAT, **body}, **how)
        assert (status, answer["error"]["code"]) == (503, "outside_region")
        assert words in answer["error"]["message"]
        assert (await stores.jobs.depths()).queues == ()


async def test_a_webhook_in_the_region_is_accepted(config: JobsConfig, clock: Clock) -> None:
    async with jobs_in(config, clock) as url:
        body = {**CHAT, "webhook": "https://hooks.example.eu/a"}
        assert (await send(url, "POST", "/v1/jobs", body, tags=EU))[0] == 202


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/files", "form"),
        ("POST", "/v1/batches", {"input_file_id": "f", "endpoint": "/v1/chat/completions", "completion_window": "24h"}),
        ("GET", "/v1/jobs", None),
        ("GET", "/v1/jobs/job_1", None),
        ("GET", "/v1/jobs/job_1/events", None),
        ("GET", "/v1/files/file-1/content", None),
        ("GET", "/v1/batches", None),
    ],
)
async def test_files_batches_and_reads_of_a_tenant_elsewhere_are_refused(
    config: JobsConfig, clock: Clock, method: str, path: str, body: object
) -> None:
    """By tag, too."""
    async with jobs_in(config, clock) as url:
        for how in ({"token": "acme-us"}, {"tags": US}):
            sent = file_form() if body == "form" else body
            status, answer = await send(url, method, path, sent, **how)
            assert (status, answer["error"]["code"]) == (503, "outside_region")


async def test_what_is_bound_is_not_read_through_a_gateway_elsewhere(config: JobsConfig, clock: Clock) -> None:
    """The store is inside, and the reader names no region: the tags of what is read count."""
    async with jobs_in(config, clock) as home, jobs_in(config, clock, region="us") as away:
        bound, free = [(await send(home, "POST", "/v1/jobs", CHAT, tags=tags))[1]["id"] for tags in (EU, "")]
        _, file = await send(home, "POST", "/v1/files", file_form(), tags=EU)
        naming = {
            **CHAT,
            "messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": file["id"]}}]}],
        }
        for url, status in ((home, 200), (away, 503)):
            assert (await send(url, "GET", f"/v1/jobs/{bound}"))[0] == status
        assert (await send(away, "GET", f"/v1/jobs/{free}"))[0] == 200
        for method, path, body in (("GET", f"/v1/jobs/{bound}/events", None), ("POST", "/v1/jobs", naming)):
            status, answer = await send(away, method, path, body)
            assert (status, answer["error"]["code"]) == (503, "outside_region")
            assert "this gateway (identity.region) is in us" in answer["error"]["message"]


@pytest.mark.parametrize(("region", "flag"), [("eu", "01"), ("us", "00"), ("", "00")])
async def test_a_collector_elsewhere_gets_no_later_span_either(
    config: JobsConfig, clock: Clock, stores: JobStores, region: str, flag: str
) -> None:
    """The stored trace context is one that is not sampled."""
    trace = JobTrace(TracerProvider().get_tracer("test"), region)
    async with jobs_in(config, clock, trace=trace) as url:
        assert (await send(url, "POST", "/v1/jobs", CHAT, tags=EU, traceparent=CALLER))[0] == 202
        (record,) = (await stores.jobs.claim("w", "large", ["standard"])).records
    assert record.traceparent.startswith(CALLER[:35])
    assert record.traceparent.endswith(flag)


def test_a_run_that_finds_its_tier_outside_is_not_repeated() -> None:
    assert classify_failure(OutsideRegion("elsewhere"), late=False) == "failed"


@pytest.mark.parametrize(("broker", "code"), [("eu", ""), ("us", "outside_region"), ("", "outside_region")])
async def test_a_message_of_a_broker_elsewhere_is_not_answered(config: JobsConfig, broker: str, code: str) -> None:
    runner = ActingRunner()
    config = msgspec.structs.replace(config, region="eu")
    messages = MessageRunner(
        StreamsConfig(tenant="factory", region=broker),
        config,
        SubmissionParser(config, TIERS, region="eu"),
        runner,
        MessageCallers(lambda _: Principal("factory", "1", frozenset({"jobs"}))),
        StreamMetrics(CollectorRegistry()),
    )
    incoming = IncomingMessage(body=encoded("q1", causewaytags=EU), position="1", published_at=0.0)
    message = read_message(incoming, "topic")
    ended = await messages.run(message, "", 1, lambda _: anyio.lowlevel.checkpoint(), 1_000_000)
    assert getattr(ended.result, "code", "") == code
    assert [run.request.hints.tags for run in runner.runs] == ([(EU,)] if not code else [])


@pytest.mark.parametrize("region", ["", "us"])
def test_a_worker_outside_the_region_of_the_store_does_not_start(region: str) -> None:
    """A worker learns the regions of a job only by reading it."""
    config = Config(identity=IdentityConfig(region=region), jobs=JobsConfig(redis="redis://127.0.0.1:9", region="eu"))
    with pytest.raises(ConfigError, match="a worker reads what is stored in eu") as found:
        Background(config, cast("Any", SimpleNamespace()), "a worker", route="job", service_name="test")
    assert found.value.where == "identity.region"
