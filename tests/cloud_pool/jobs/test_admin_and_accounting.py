"""Operator commands, metrics, accounting of runs, and a Redis with unsafe settings."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import aiohttp
import msgspec
import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry

from causeway_server.cloud_pool.accounts.audit import AuditLog
from causeway_server.cloud_pool.accounts.ledger import Ledger, TenantMetrics
from causeway_server.cloud_pool.accounts.tenants.config import TenantConfig, TenantsConfig
from causeway_server.cloud_pool.accounts.tenants.rate_limiter import TenantRateLimiter
from causeway_server.cloud_pool.accounts.tenants.usage import UsageRecorder
from causeway_server.cloud_pool.app import JobsGateway
from causeway_server.cloud_pool.cli.main import main
from causeway_server.cloud_pool.core.principal import Principal
from causeway_server.cloud_pool.jobs.http.job_api import JobCallers
from causeway_server.cloud_pool.jobs.metrics import JobMetrics
from causeway_server.cloud_pool.jobs.worker.runner import JobRun, MeteredRunner
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.job_store import JobStore
from causeway_server.cloud_pool.storage.record import ExpiredJob, NewJob
from causeway_server.cloud_pool.storage.redis_client import RedisClient
from causeway_server.cloud_pool.storage.stores import JobStores
from causeway_server.router.errors import CausewayError, CloudFailed, InvalidRequest, RateLimited
from causeway_server.router.openai.chat import parse_chat
from causeway_server.router.types import Chunk, RoutingHints

from .conftest import BODY, Clock
from .gateway import identify, serving
from .redis_server import RedisServer
from .scripted_worker import ScriptedRunner, answers, running_record
from .test_api import CHAT, TIER

MakeJob = Callable[..., NewJob]


async def dead_job(store: JobStore, new_job: MakeJob, config: JobsConfig) -> str:
    job = (await store.accept(new_job())).id
    for _ in range(config.max_attempts):
        (record,) = (await store.claim("w", "large", ["standard"])).records
        await store.postpone(job, record.fence, CloudFailed("broken"), 0.0, counts=True)
        await store.promote_and_expire()
    return job


@pytest.fixture
def dlq(config: JobsConfig, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Run `causeway-cloud dlq ...` on this test's keys. It starts an event loop: call it on a thread."""
    path = tmp_path / "gateway.yaml"
    path.write_text(f'jobs: {{key_prefix: "{config.key_prefix}"}}\n')

    def call(*arguments: str) -> tuple[int, str]:
        found = CliRunner().invoke(main, ["dlq", "--config", str(path), "--redis", str(config.redis), *arguments])
        return found.exit_code, found.output

    return call


async def test_dead_letters_are_listed_retried_and_purged(
    store: JobStore, database: RedisClient, new_job: MakeJob, config: JobsConfig, dlq: Callable[..., tuple[int, str]]
) -> None:
    """`dlq list` shows owner, attempts and error code, but no content."""
    first = await dead_job(store, new_job, config)
    second = await dead_job(store, new_job, config)
    status, text = await asyncio.to_thread(dlq, "list")
    assert status == 0
    assert [row.split("\t")[1:] for row in text.splitlines()] == [
        [job, "kiosk", "large", str(config.max_attempts), "cloud_failed"] for job in (second, first)
    ]
    assert "secret" not in text
    assert await asyncio.to_thread(dlq, "retry", first) == (0, f"{first}\tqueued again\n")
    status, text = await asyncio.to_thread(dlq, "retry", first)
    assert (status, text.startswith(f"{first}\tleft")) == (1, True)
    status, text = await asyncio.to_thread(dlq, "purge", "--all")
    assert (status, "no terminal to ask at; --yes" in text) == (2, True)
    assert second in (await asyncio.to_thread(dlq, "list"))[1]
    assert await asyncio.to_thread(dlq, "purge", "--all", "--yes") == (0, f"{second}\tpurged\n")
    assert await asyncio.to_thread(dlq, "list") == (0, "There are no dead letters.\n")
    assert (await asyncio.to_thread(dlq, "purge"))[0] == 2
    today = JobStores.open(config)  # the command uses the real clock
    assert [record.id for record in (await today.jobs.claim("w", "large", ["standard"] * 3)).records] == [first]
    await today.close()


@pytest.mark.parametrize("command", [["worker"], ["dlq", "list"]])
def test_a_command_without_redis_exits_with_status_2(command: list[str]) -> None:
    found = CliRunner().invoke(main, command, env={"CAUSEWAY_REDIS": ""})
    assert (found.exit_code, "redis" in found.output.lower()) == (2, True)
    assert "Traceback" not in found.output


async def test_queue_depths_are_exported_as_gauges(
    store: JobStore, new_job: MakeJob, clock: Clock, config: JobsConfig
) -> None:
    await dead_job(store, new_job, config)
    for _ in range(3):
        await store.accept(new_job(priority="bulk"))
    await store.claim("w", "large", ["bulk"])
    registry = CollectorRegistry()
    depths = await store.depths()
    oldest = next(one.oldest_ms for one in depths.queues if one.priority == "bulk")
    JobMetrics(registry).set_depths(depths, oldest + 7000)
    bulk = {"tier": "large", "priority": "bulk"}
    assert registry.get_sample_value("causeway_jobs_queued", bulk) == 2
    assert registry.get_sample_value("causeway_jobs_running", bulk) == 1
    assert registry.get_sample_value("causeway_jobs_oldest_queued_seconds", bulk) == 7
    assert registry.get_sample_value("causeway_jobs_dead_letters") == 1


async def test_a_gateway_refuses_jobs_on_a_redis_that_is_not_durable(config: JobsConfig, clock: Clock) -> None:
    """The 503 names the setting; existing jobs can still be read."""
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        server = RedisServer(Path(folder), "--appendonly", "no")
        gateway = JobsGateway(
            msgspec.structs.replace(config, redis=server.url),
            {"big": TIER},
            JobCallers(identify),
            CollectorRegistry(),
            clock=clock,
        )
        try:
            headers = {"authorization": "Bearer kiosk"}
            async with serving(gateway.api.handler) as url, aiohttp.ClientSession(url, headers=headers) as http:
                async with http.post("/v1/jobs", json=CHAT) as response:
                    fault = (await response.json())["error"]
                    assert (response.status, fault["code"]) == (503, "job_store_not_durable")
                    assert "appendonly is no" in fault["message"]
                async with http.get("/v1/jobs") as response:
                    assert (await response.json())["data"] == []
        finally:
            await gateway.close()
            server.kill()


class AuditedLedger:
    """A real ledger without Redis that writes its audit records to a file."""

    def __init__(self, folder: Path, config: TenantsConfig) -> None:
        self.path = folder / "audit"
        self.audit = AuditLog(str(self.path))
        limiter, usage = TenantRateLimiter(config, None), UsageRecorder(config, None)
        self.ledger = Ledger(config, limiter, usage, self.audit, TenantMetrics(CollectorRegistry()))

    def records(self) -> list[dict[str, object]]:
        self.audit.close()
        return [msgspec.json.decode(row) for row in self.path.read_bytes().splitlines()]


async def breaks(_at: int, _run: JobRun) -> AsyncGenerator[Chunk, None]:
    raise CloudFailed("broken")
    yield Chunk()


def job_run(number: int, body: bytes = BODY) -> JobRun:
    request = parse_chat(body, RoutingHints())
    record = running_record(f"job_{number}", "acme/kiosk")
    return JobRun(record=record, request=request, body_bytes=len(body), deadline=1e9)


async def outcome(runner: MeteredRunner, one: JobRun) -> type[CausewayError] | None:
    try:
        async for _ in runner.run(one):
            pass
    except CausewayError as error:
        return type(error)
    finally:
        one.receipt.close(accepted=True)
    return None


async def test_runs_obey_tenant_limits_and_leave_one_audit_record_each(tmp_path: Path) -> None:
    """A run that the limits refuse leaves none: the job waits. If it expires, its record says so."""
    limits = TenantConfig(name="acme", requests_per_s=0.001, burst=2, max_tokens=9)
    books = AuditedLedger(tmp_path, TenantsConfig(overrides=(limits,)))
    books.audit.start()
    scripted = ScriptedRunner(answers)
    runner = MeteredRunner(scripted, books.ledger)
    assert await outcome(runner, job_run(1)) is None
    assert await outcome(MeteredRunner(ScriptedRunner(breaks), books.ledger), job_run(2)) is CloudFailed
    assert await outcome(runner, job_run(3)) is RateLimited
    runner.record_expired(ExpiredJob("job_3", "acme/kiosk", "large"))
    assert await outcome(runner, job_run(4, BODY[:-1] + b',"max_tokens":10}')) is InvalidRequest
    assert [one.request.max_tokens for one in scripted.runs] == [9]
    rows = books.records()
    assert [(row["id"], row["outcome"]) for row in rows] == [
        ("job_1", "ok"),
        ("job_2", "cloud_failed"),
        ("job_3", "deadline_exceeded"),
        ("job_4", "invalid_value"),
    ]
    assert (rows[0]["tenant"], rows[0]["device"], rows[0]["route"]) == ("acme", "kiosk", "job")
    assert (rows[0]["prompt_tokens"], rows[0]["completion_tokens"]) == (5, 2)
    assert "secret" not in books.path.read_text()


async def test_submissions_have_the_tenants_rate_in_a_bucket_of_their_own(
    tmp_path: Path, config: JobsConfig, clock: Clock
) -> None:
    """Jobs, files and batches count; reads have another, and neither is another tenant's."""
    limits = TenantConfig(name="acme", requests_per_s=0.001, burst=2, reads_per_s=0.001)
    ledger = AuditedLedger(tmp_path, TenantsConfig(overrides=(limits,))).ledger
    gateway = JobsGateway(
        config,
        {"big": TIER},
        JobCallers(identify, admit=ledger.admit_submission, admit_reads=ledger.admit_reads),
        CollectorRegistry(),
        clock=clock,
    )
    async with serving(gateway.api.handler) as url, aiohttp.ClientSession(url) as http:

        async def status(tenant: str, path: str = "/v1/jobs", method: str = "POST") -> int:
            headers = {"authorization": f"Bearer {tenant}"}
            async with http.request(method, path, json=CHAT if method == "POST" else None, headers=headers) as response:
                if response.status == 429:
                    assert int(response.headers["retry-after"]) >= 1
                    limit = "requests_per_s" if method == "POST" else "reads_per_s"
                    assert limit in (await response.json())["error"]["message"]
                return response.status

        assert [await status("acme") for _ in range(3)] == [202, 202, 429]
        assert await status("acme", "/v1/files") == 429
        assert await status("acme", "/v1/batches") == 429
        assert await status("acme", method="GET") == 200
        for path in ("/v1/jobs", "/v1/files?limit=1", "/v1/batches", "/v1/jobs/job_1/events"):
            assert await status("acme", path, "GET") == 429
        assert await status("acme", "/v1/jobs/job_1", "DELETE") == 429
        assert await status("other") == 202
        assert await status("other", method="GET") == 200
    await gateway.close()
    request = parse_chat(BODY, RoutingHints())
    principal = Principal("acme", "1", frozenset({"chat"}))
    for _ in range(2):  # requests have a bucket of their own
        await ledger.admit(ledger.open("chat", {}), principal, request, 1, max_tokens=1, lifetime_s=1.0)


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/files", "/v1/batches"])
async def test_a_list_counts_as_a_read_and_one_more_for_every_ten_rows(
    tmp_path: Path, config: JobsConfig, clock: Clock, path: str
) -> None:
    limits = TenantConfig(name="acme", reads_per_s=10)  # twenty at once
    ledger = AuditedLedger(tmp_path, TenantsConfig(overrides=(limits,))).ledger
    gateway = JobsGateway(
        config, {"big": TIER}, JobCallers(identify, admit_reads=ledger.admit_reads), CollectorRegistry(), clock=clock
    )
    headers = {"authorization": "Bearer acme"}
    async with serving(gateway.api.handler) as url, aiohttp.ClientSession(url, headers=headers) as http:

        async def status(path: str) -> int:
            async with http.get(path) as response:
                return response.status

        assert await status(f"{path}?limit=100") == 200
        assert await status(f"{path}?limit=100") == 429
        assert await status(f"{path}?limit=80") == 200
        assert await status(f"{path}?limit=1") == 429
    await gateway.close()
