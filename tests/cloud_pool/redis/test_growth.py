"""Every key in Redis is declared and bounded: days of mixed traffic in miniature, with clocks that the test moves.

Scripts get the test's time. Times to live run by Redis's own clock, so each step shortens them by the time that passes.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack
from importlib.resources import files
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import redis
import redis.asyncio
from prometheus_client import CollectorRegistry

from causeway_server.cloud_pool.accounts.identity.revocation import revoke_device, revoke_token
from causeway_server.cloud_pool.accounts.tenants.config import TenantLimits, TenantsConfig
from causeway_server.cloud_pool.accounts.tenants.rate_limiter import TenantRateLimiter
from causeway_server.cloud_pool.accounts.tenants.usage import Charge, Demand, UsageRecorder
from causeway_server.cloud_pool.admission import AdmissionController, AdmissionSettings
from causeway_server.cloud_pool.admission.peer_heartbeat import PeerHeartbeat, SharedTier
from causeway_server.cloud_pool.app import JobsGateway
from causeway_server.cloud_pool.background import WorkerRuntime
from causeway_server.cloud_pool.cache.config import CacheConfig
from causeway_server.cloud_pool.dispatch.endpoint_selection import PoolCapacity
from causeway_server.cloud_pool.jobs.http.job_api import JobCallers
from causeway_server.cloud_pool.jobs.worker.execution import WorkerSlots
from causeway_server.cloud_pool.jobs.worker.runner import JobRun
from causeway_server.cloud_pool.redis.connect import open_redis
from causeway_server.cloud_pool.redis.keys import ensure_accounts_layout
from causeway_server.cloud_pool.storage.config import JobsConfig, WebhookConfig
from causeway_server.cloud_pool.storage.stores import JobStores
from causeway_server.router.errors import CloudFailed, RateLimited
from causeway_server.router.types import Chunk, Usage
from tests.cloud_pool.cache.gateways import Clock as CacheClock
from tests.cloud_pool.cache.gateways import ask, gateway
from tests.cloud_pool.jobs.conftest import Clock
from tests.cloud_pool.jobs.gateway import identify, serving
from tests.cloud_pool.jobs.scripted_worker import ScriptedRunner, answers
from tests.cloud_pool.jobs.test_api import TIER
from tests.cloud_pool.jobs.webhook_receiver import Receiver, receiving
from tests.cloud_pool.redis.declared_keys import REDIS_KEYS, declared
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.redis, pytest.mark.slow]
HOUR_S, DAY_S = 3600.0, 86_400.0
STEP_S = 4 * HOUR_S
PATIENCE_S = 60.0
TIERS = {"large": TIER}
CHAT: dict[str, object] = {"model": "large", "messages": [{"role": "user", "content": "a question"}]}
LINES = {"a": 7, "b": 7, "poison": 13}


async def mixed(at: int, job_run: JobRun) -> AsyncGenerator[Chunk, None]:
    """A worker's model: some jobs crash it until they are dead, one tenant is over its limit for an hour at a time."""
    if job_run.request.max_tokens == 13:
        raise CloudFailed("broken")
    if job_run.record.owner.startswith("limited") and at % 2:
        raise RateLimited("over your budget", retry_after_s=HOUR_S)
    async for chunk in answers(at, job_run):
        yield chunk


class MiniatureDay:
    """A gateway, a worker and what else writes to Redis, over an empty server."""

    def __init__(self, server: RedisServer, http: aiohttp.ClientSession, receiver: Receiver, clock: Clock) -> None:
        self.server = server
        self.clock = clock
        self._http = http
        self._receiver = receiver
        self._redis = open_redis(server.url)
        limits = TenantLimits(requests_per_s=5, tokens_per_minute=1000, usd_per_day=1)
        tenants = TenantsConfig(default=limits, redis_timeout_s=5.0)
        self._limiter = TenantRateLimiter(tenants, self._redis, now_s=clock, wall_clock=clock)
        self._usage = UsageRecorder(tenants, self._redis, wall_clock=clock)
        self.jobs: list[tuple[str, str]] = []  # tenant, id
        self.batches: list[tuple[str, str]] = []

    async def step(self, number: int) -> None:
        """The traffic of some hours, from devices that no other day has."""
        day = number // 6
        for tenant in (f"acme{day}", f"limited{day}", "steady"):
            url = f"http://127.0.0.1:{self._receiver.port}/"
            await self._submit(tenant, f"{number}-plain", CHAT)
            await self._submit(tenant, f"{number}-bulk", CHAT | {"priority": "bulk"})
            await self._submit(tenant, f"{number}-told", CHAT | {"webhook": url})
            await self._submit(tenant, f"{number}-dead", CHAT | {"max_tokens": 13})
            await self._submit(
                tenant, f"{number}-gone", CHAT | {"webhook": "http://127.0.0.1:9/", "deadline_ms": 60_000}
            )
            cancelled = await self._submit(tenant, f"{number}-cancelled", CHAT)
            await self._request("DELETE", f"/v1/jobs/{cancelled}", tenant)
        await self._submit_batch(f"acme{day}")
        await self._rates_and_usage(f"acme{day}")
        await ensure_accounts_layout(self._redis)
        await revoke_token(self._redis, f"token-{number}", self.clock.now + HOUR_S, self.clock.now)
        await revoke_device(self._redis, f"acme{day}/device-{number}", self.clock.now)
        await self._heartbeat()
        await self._cache(number)

    async def pass_time(self, seconds: float) -> None:
        """Move the clock of the scripts, and shorten every time to live."""
        self.clock.now += seconds
        with self.server.client() as client:
            lives = _ask_each(client, "PTTL").items()
            with client.pipeline(transaction=False) as pipeline:
                for key, (left_ms,) in lives:
                    if left_ms >= 0:
                        pipeline.pexpire(key, max(1, left_ms - int(seconds * 1000)))
                pipeline.execute()

    async def settle(self, stores: JobStores) -> None:
        """Wait until every job and batch has ended."""
        for tenant, name in self.jobs + self.batches:
            path = f"/v1/batches/{name}" if name.startswith("batch") else f"/v1/jobs/{name}"
            async with asyncio.timeout(PATIENCE_S):
                while (await self._request("GET", path, tenant)).get("status") in (
                    *("queued", "running", "waiting"),
                    *("validating", "in_progress", "finalizing"),
                ):
                    await self.pass_time(60.0)
                    await asyncio.sleep(0.02)
        self.jobs, self.batches = [], []
        while await stores.files.delete_due():
            pass

    def undeclared(self) -> list[str]:
        """Keys without exactly one declaration, of another type, or without the time to live that they should have."""
        found = []
        with self.server.client() as client:
            for key, (type_, left_ms) in _ask_each(client, "TYPE", "PTTL").items():
                name, kind = key.decode(), type_.decode()
                declarations = declared(name)
                if left_ms == -2:
                    continue  # it has just expired
                if [each.type for each in declarations] != [kind]:
                    found.append(f"{name}: {kind}, declared as {declarations}")
                elif declarations[0].kind == "ttl" and left_ms < 0:
                    found.append(f"{name} has no time to live")
        return found

    def left(self) -> dict[str, int]:
        """The keys without a time to live that are not declared as fixed, and how many members each has."""
        with self.server.client() as client:
            return {
                key.decode(): _size(client, key)
                for key, (left_ms,) in _ask_each(client, "PTTL").items()
                if left_ms == -1 and declared(key.decode())[0].kind != "fixed"
            }

    def fixed(self) -> dict[str, int]:
        with self.server.client() as client:
            keys = sorted(client.scan_iter(count=1000))
            return {key.decode(): _size(client, key) for key in keys if declared(key.decode())[0].kind == "fixed"}

    async def close(self) -> None:
        await self._redis.aclose()

    async def _request(self, method: str, path: str, tenant: str, **options: object) -> dict[str, object]:
        headers = {"authorization": f"Bearer {tenant}", **options.pop("headers", {})}  # type: ignore[dict-item]
        async with self._http.request(method, path, headers=headers, **options) as reply:  # type: ignore[arg-type]
            body: dict[str, object] = await reply.json()
            assert reply.status < 400 or method in ("GET", "DELETE"), body
            return body

    async def _submit(self, tenant: str, key: str, body: dict[str, object]) -> str:
        job = await self._request("POST", "/v1/jobs", tenant, json=body, headers={"idempotency-key": key})
        self.jobs.append((tenant, str(job["id"])))
        return str(job["id"])

    async def _submit_batch(self, tenant: str) -> None:
        rows = [
            {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": CHAT | {"max_tokens": limit}}
            for name, limit in LINES.items()
        ]
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", "\n".join(map(json.dumps, rows)), filename="lines.jsonl")
        file = await self._request("POST", "/v1/files", tenant, data=form)
        body = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = await self._request("POST", "/v1/batches", tenant, json=body)
        self.batches.append((tenant, str(batch["id"])))

    async def _rates_and_usage(self, tenant: str) -> None:
        await self._limiter.flush()
        reservation = await self._limiter.reserve(tenant, Demand(tokens=50, pico_usd=7))
        self._limiter.settle(Charge(reservation, "large", "chat", Usage(5, 2), 7))
        self._usage.record(Charge(reservation, "large", "chat", Usage(5, 2), 7))
        await self._limiter.reserve(f"{tenant}-killed", Demand(tokens=50, pico_usd=7))
        await self._limiter.flush()
        assert await self._usage.flush()

    async def _heartbeat(self) -> None:
        admission = AdmissionController(16, 64, AdmissionSettings(permits=16, max_queued=64))
        shared = SharedTier("large", 16, lambda: ("e",), lambda: PoolCapacity(1), admission)
        await PeerHeartbeat(self._redis, [shared]).beat()

    async def _cache(self, number: int) -> None:
        config = CacheConfig(enabled=True, redis_timeout_s=5.0, lease_s=20.0)
        clock = CacheClock()
        async with gateway(self.server.url, config, clock) as one, gateway(self.server.url, config, clock) as other:
            leader = one.ask(ask(f"question {number}", stream=True))
            one.script.permit(1)
            follower = other.ask(ask(f"question {number}", stream=True))
            one.script.permit(9)
            other.script.permit(9)
            await leader.end()
            await follower.end()


def _ask_each(client: redis.Redis, *commands: str) -> dict[bytes, tuple[Any, ...]]:
    """Return the answers of these commands for each key."""
    keys = list(client.scan_iter(count=1000))
    with client.pipeline(transaction=False) as pipeline:
        for key in keys:
            for command in commands:
                pipeline.execute_command(command, key)  # type: ignore[no-untyped-call]
        answers = iter(pipeline.execute())
    return {key: tuple(itertools.islice(answers, len(commands))) for key in keys}


def _size(client: redis.Redis, key: bytes) -> int:
    sizes = {"string": "STRLEN", "hash": "HLEN", "list": "LLEN", "set": "SCARD", "zset": "ZCARD", "stream": "XLEN"}
    kind = str(client.type(key), "ascii")  # type: ignore[arg-type]
    return int(client.execute_command(sizes[kind], key))  # type: ignore[no-untyped-call]


@pytest.fixture
def server(tmp_path: Path) -> object:
    server = RedisServer(tmp_path)
    yield server
    server.kill()


@pytest.fixture
def config(server: RedisServer) -> JobsConfig:
    webhooks = WebhookConfig(allowed_networks=("127.0.0.0/8",), allow_http=True)
    quick = {"lease_check_s": 0.02, "reclaim_interval_s": 0.02, "backoff_s": 0.001, "max_attempts": 2, "drain_s": 0.0}
    return JobsConfig(redis=server.url, max_dead_letters=8, webhooks=webhooks, **quick)  # type: ignore[arg-type]


@pytest_asyncio.fixture
async def day(server: RedisServer, config: JobsConfig) -> AsyncIterator[MiniatureDay]:
    clock = Clock()
    async with AsyncExitStack() as stack:
        receiver = await stack.enter_async_context(receiving())
        made = JobsGateway(config, TIERS, JobCallers(identify), CollectorRegistry(), clock=clock)
        stack.push_async_callback(made.close)
        url = await stack.enter_async_context(serving(made.api.handler))
        http = await stack.enter_async_context(aiohttp.ClientSession(url))
        day = MiniatureDay(server, http, receiver, clock)
        stack.push_async_callback(day.close)
        yield day


@pytest_asyncio.fixture
async def working(config: JobsConfig, day: MiniatureDay) -> AsyncIterator[JobStores]:
    """A worker at work, and stores of the same Redis."""
    runtime = WorkerRuntime(
        config, TIERS, ScriptedRunner(mixed), {"large": WorkerSlots("large", 4)}, CollectorRegistry(), clock=day.clock
    )
    stores = JobStores.open(config, day.clock)
    stop = asyncio.Event()
    assert await runtime.start(stop)
    running = asyncio.ensure_future(runtime.run(stop))
    yield stores
    stop.set()
    await running
    await runtime.close()
    await stores.close()


async def test_days_of_mixed_traffic_leave_only_declared_and_bounded_keys(
    day: MiniatureDay, working: JobStores
) -> None:
    """Two days of traffic grow nothing but times to live; a year later only the fixed keys are there."""
    sizes = []
    for number in range(12):
        await day.step(number)
        assert day.undeclared() == []
        await day.settle(working)
        await day.pass_time(STEP_S)
        assert day.undeclared() == []
        if number in (5, 11):
            sizes.append(day.fixed())
    assert sizes[1].keys() - sizes[0].keys() <= {"causeway:jobs:wake:large"}, "fixed keys become more each day"
    async with asyncio.timeout(PATIENCE_S):
        while day.left():  # webhooks that never arrive give up, files and batches go
            await day.pass_time(DAY_S)
            while await working.files.delete_due():
                pass
            assert day.undeclared() == []
            await asyncio.sleep(0.1)
    await day.pass_time(401 * DAY_S)
    await asyncio.sleep(0.1)
    client = day.server.client()
    left_over = {key.decode() for key in client.scan_iter()} - day.fixed().keys()
    assert {name for name in left_over if declared(name)[0].pattern != "<jobs>:tags:<tier>:<priority>"} == set()
    await revoke_both(day)
    fixed = day.fixed()
    assert [fixed[f"causeway:{{revoked}}:{name}"] for name in ("tokens", "devices")] == [1, 1]
    assert fixed["causeway:jobs:dead"] <= 8 + 100  # a stream is trimmed by whole nodes
    assert fixed.get("causeway:jobs:wake:large", 0) <= 64


async def revoke_both(day: MiniatureDay) -> None:
    async with open_redis(day.server.url) as client:
        await revoke_token(client, "last", day.clock.now + HOUR_S, day.clock.now)
        await revoke_device(client, "acme/last", day.clock.now)


def test_every_key_in_the_scripts_of_jobs_is_declared() -> None:
    """Also those that the miniature days do not write."""
    used = set()
    for file in Path(str(files("causeway_server.cloud_pool.storage") / "lua")).rglob("*.lua"):
        used |= set(re.findall(r"\bkey\('(\w+)'", file.read_text()))
    assert "job" in used
    assert used - {key.pattern.split(":")[1] for key in REDIS_KEYS} == set()


def test_a_key_matches_one_declaration() -> None:
    """Of two patterns the one with more parts is meant, never both."""
    samples = {
        "causeway:jobs:queue:large:bulk": "<jobs>:queue:<tier>:<priority>",
        "causeway:jobs:queue:large:bulk:acme": "<jobs>:queue:<tier>:<priority>:<tenant>",
        "causeway:jobs:webhooks:acme": "<jobs>:webhooks:<tenant>",
        "causeway:jobs:webhooks:acme:https://a:1": "<jobs>:webhooks:<tenant>:<receiver>",
        "causeway:cache:{ab}:lease:": "<cache>:{<digest>}:lease:<rank>",
        "causeway:tenant:{acme}:usage:2026-11-21": "causeway:tenant:{<tenant>}:usage:<day>",
    }
    assert {key: [each.pattern for each in declared(key)] for key in samples} == {
        key: [pattern] for key, pattern in samples.items()
    }
    assert declared("causeway:jobs:something:else") == ()
    assert len({key.pattern for key in REDIS_KEYS}) == len(REDIS_KEYS)
