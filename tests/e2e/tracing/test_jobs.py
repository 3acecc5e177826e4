"""A job's trace from its submission to its webhook, with the shared cache."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest_asyncio
from prometheus_client import CollectorRegistry

from causeway_server.cloud_pool.accounts.tenants.config import TenantsConfig
from causeway_server.cloud_pool.app import JobsGateway
from causeway_server.cloud_pool.background import WorkerRuntime
from causeway_server.cloud_pool.cache.config import CacheConfig
from causeway_server.cloud_pool.jobs.http.job_api import JobCallers
from causeway_server.cloud_pool.jobs.worker.execution import WorkerSlots
from causeway_server.cloud_pool.jobs.worker.runner import MeteredRunner, ServiceBackend
from causeway_server.cloud_pool.observability.tracing import Tracing
from causeway_server.cloud_pool.storage.config import JobsConfig, WebhookConfig
from causeway_server.router.config import TracingConfig
from causeway_server.router.errors import CloudFailed
from tests.cloud_pool.cache.gateways import TIERS, Client, Gateway, Script, ask, gateway
from tests.cloud_pool.jobs.conftest import Clock, until
from tests.cloud_pool.jobs.conftest import clock as clock
from tests.cloud_pool.jobs.conftest import config as config
from tests.cloud_pool.jobs.conftest import redis_server as redis_server
from tests.cloud_pool.jobs.gateway import identify, serving
from tests.cloud_pool.jobs.scripted_worker import no_vectors
from tests.cloud_pool.jobs.test_admin_and_accounting import AuditedLedger
from tests.cloud_pool.jobs.webhook_receiver import Receiver, receiving

from .collector import Collector, Span

SERVER, CLIENT, PRODUCER, CONSUMER = 2, 3, 4, 5
CALLER = "00-{:032x}-b7ad6b7169203331-01"
SECRET = "mysecretword"
BODY = {"model": "large", "messages": [{"role": "user", "content": SECRET}], "temperature": 0}
_prefixes = itertools.count()
_traces = itertools.count(1)


class Bed:
    """A gateway that accepts jobs and a worker that runs them, both tracing to one collector."""

    def __init__(self, config: JobsConfig, worker: Gateway, url: str, books: AuditedLedger, clock: Clock) -> None:
        def tick() -> float:  # what is to be tried again becomes due
            clock.now += 0.5
            return clock.now

        self.collector = Collector()
        self.worker = worker
        self._url = url
        self._tick = tick
        self._config = config
        self._books = books

    async def start(self) -> None:
        await self.collector.start()
        settings = TracingConfig(endpoint=self.collector.url)
        self.here, self.there = Tracing(settings, "causeway-gateway"), Tracing(settings, "causeway-worker")
        self.gateway = JobsGateway(
            self._config, TIERS, JobCallers(identify), CollectorRegistry(), trace=self.here.jobs, clock=self._tick
        )
        runner = MeteredRunner(
            ServiceBackend(self.worker.caching_service, no_vectors, TIERS, {}), self._books.ledger, self.there.jobs
        )
        self.runtime = WorkerRuntime(
            self._config,
            TIERS,
            runner,
            {"large": WorkerSlots("large", 2)},
            CollectorRegistry(),
            trace=self.there.jobs,
            clock=self._tick,
        )

    async def run(self, **changes: object) -> tuple[str, list[Span]]:
        """Submit one job and wait for its end; return its id and the spans of its trace."""
        number = f"{next(_traces):032x}"
        headers = {"authorization": "Bearer acme", "traceparent": CALLER.format(int(number, 16))}
        stop = asyncio.Event()
        async with serving(self.gateway.api.handler) as url, aiohttp.ClientSession(url, headers=headers) as http:
            async with http.post("/v1/jobs", json={**BODY, "webhook": self._url, **changes}) as response:
                job = str((await response.json())["id"])

            async def delivered() -> bool:
                async with http.get(f"/v1/jobs/{job}") as response:
                    return (await response.json())["webhook_status"] not in ("", None, "pending")

            working = asyncio.ensure_future(self.runtime.run(stop))
            await until(delivered)
            stop.set()
            await working
        return job, [span for span in await self.spans() if span.trace == number]

    async def spans(self) -> list[Span]:
        for tracing in (self.here, self.there):
            await asyncio.to_thread(tracing.flush)
        return self.collector.spans

    async def close(self) -> None:
        await self.gateway.close()
        await self.runtime.close()
        for tracing in (self.here, self.there):
            await asyncio.to_thread(tracing.close)
        await self.collector.stop()


@pytest_asyncio.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as receiver:
        yield receiver


@pytest_asyncio.fixture
async def bed(config: JobsConfig, clock: Clock, receiver: Receiver, tmp_path: Path) -> AsyncIterator[Bed]:
    hooks = WebhookConfig(allowed_networks=("127.0.0.0/8",), allow_http=True)
    config = msgspec.structs.replace(config, webhooks=hooks)
    settings = CacheConfig(enabled=True, key_prefix=f"t{next(_prefixes)}", redis_timeout_s=5.0, lease_s=0.06)
    books = AuditedLedger(tmp_path, TenantsConfig())
    async with gateway(str(config.redis), settings, lambda: -1, Script()) as worker:
        worker.script.permit(1000)
        made = Bed(config, worker, f"http://127.0.0.1:{receiver.port}/", books, clock)
        await made.start()
        yield made
        await made.close()


def names(spans: list[Span]) -> list[str]:
    return [span.name for span in sorted(spans, key=lambda span: (span.begin, span.end))]


async def test_one_trace_shows_accept_claim_run_and_webhook(bed: Bed) -> None:
    """The gateway's span is a child of the client's; the worker's are children of it and linked to it. No span
    has content."""
    job, spans = await bed.run()
    assert names(spans) == [
        "send large", "receive large", "process large", "cache lookup", "cache keep", "POST webhook",
    ]  # fmt: skip
    send, receive, process, lookup, keep, post = sorted(spans, key=lambda span: (span.begin, span.end))
    assert (send.service, send.kind, send.parent) == ("causeway-gateway", PRODUCER, "b7ad6b7169203331")
    for span, kind in ((receive, CLIENT), (process, CONSUMER), (post, CLIENT)):
        assert (span.service, span.kind, span.parent, span.links) == ("causeway-worker", kind, send.id, (send.id,))
    for span, operation in ((send, "send"), (receive, "receive"), (process, "process")):
        assert span.attributes["messaging.operation.type"] == operation
        assert span.attributes["messaging.destination.name"] == "large"
        assert span.attributes["messaging.message.id"] == job
    assert process.attributes["gen_ai.operation.name"] == "chat"
    assert process.attributes["gen_ai.usage.output_tokens"] == 3
    assert (process.attributes["causeway.attempt"], process.attributes["causeway.cache"]) == (1, "miss")
    assert (lookup.parent, lookup.kind, lookup.attributes["causeway.outcome"]) == (process.id, CLIENT, "lead")
    assert (keep.parent, keep.attributes["causeway.outcome"]) == (process.id, "kept")
    assert (post.attributes["http.response.status_code"], post.error) == (200, "")
    assert SECRET not in repr(spans)
    assert "an answer" not in repr(spans)


async def test_cache_hit_is_one_lookup(bed: Bed) -> None:
    """The trace of a second job with the same question names the source and no cost."""
    await bed.run()
    _, spans = await bed.run()
    found = {span.name: span for span in spans}
    assert "cache keep" not in found
    assert found["cache lookup"].attributes["causeway.outcome"] == "hit"
    assert found["process large"].attributes["causeway.cache"] == "hit"
    assert found["process large"].attributes["gen_ai.usage.output_tokens"] == 0


async def until_requested(script: Script) -> None:
    async def is_so() -> bool:
        return bool(script.requests)

    await until(is_so)


async def test_each_run_is_a_span(bed: Bed) -> None:
    """The first with its error."""
    script = bed.worker.script
    script.error, script.breaks_after = CloudFailed("broken"), 0

    async def repair() -> None:
        await until_requested(script)
        script.error = None

    mending = asyncio.ensure_future(repair())
    _, spans = await bed.run()
    await mending
    runs = [span for span in sorted(spans, key=lambda span: span.begin) if span.name == "process large"]
    assert [(run.attributes["causeway.attempt"], run.error) for run in runs] == [(1, "cloud_failed"), (2, "")]
    assert names(spans).count("receive large") == 2


async def test_refusing_receiver_is_an_error_with_its_status(bed: Bed, receiver: Receiver) -> None:
    receiver.answers = [410]
    _, spans = await bed.run()
    (post,) = (span for span in spans if span.name == "POST webhook")
    assert (post.error, post.attributes["http.response.status_code"]) == ("410", 410)


async def test_refused_job_is_a_failed_send(bed: Bed) -> None:
    """The span has the error's code and no children."""
    headers = {"authorization": "Bearer acme", "idempotency-key": "k", "traceparent": CALLER.format(77_777)}
    async with serving(bed.gateway.api.handler) as url, aiohttp.ClientSession(url, headers=headers) as http:
        for body, status in ((BODY, 202), (BODY | {"max_tokens": 1}, 409)):
            async with http.post("/v1/jobs", json=body) as response:
                assert response.status == status
    sent = [span.error for span in await bed.spans() if span.trace == f"{77_777:032x}"]
    assert sent == ["", "idempotency_conflict"]


async def test_subscriber_is_linked_to_the_generations_trace(config: JobsConfig) -> None:
    collector = await Collector().start()
    tracing = Tracing(TracingConfig(endpoint=collector.url), "causeway-gateway")
    settings = CacheConfig(enabled=True, key_prefix=f"t{next(_prefixes)}", redis_timeout_s=5.0, lease_s=0.06)
    async with gateway(str(config.redis), settings, lambda: -1) as here:
        traces = [tracing.begin(ask(), name, "") for name in ("one", "two")]
        clients: list[Client] = []
        for trace in traces:
            clients.append(here.ask(ask(), trace=trace))
            await asyncio.sleep(0)
        here.script.permit(100)
        for one, trace in zip(clients, traces, strict=True):
            await one.end()
            assert trace is not None
            trace.end(tier="large", outcome="ok", usage=one.usage, headers=one.headers)  # type: ignore[arg-type]
    await asyncio.to_thread(tracing.close)
    spans = collector.spans
    first, second = sorted((span for span in spans if span.kind == SERVER), key=lambda span: span.begin)
    assert (first.links, second.links) == ((), (first.id,))
    steps = [span for span in spans if span.name.startswith("cache ")]
    assert {(step.name, step.parent) for step in steps} == {("cache lookup", first.id), ("cache keep", first.id)}
    await collector.stop()
