"""A worker's accounts on a real Redis: prices, budgets, usage. As a program it is a worker that can be killed:

    python -m tests.cloud_pool.jobs.billing URL PREFIX after|during

It prints the id of each job that it has reported (after), or that it runs for ever (during), and moves no bill.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import anyio
import msgspec
import redis.asyncio
from prometheus_client import CollectorRegistry

from causeway_server.cloud_pool.accounts.audit import AuditLog
from causeway_server.cloud_pool.accounts.ledger import Ledger, TenantMetrics
from causeway_server.cloud_pool.accounts.tenants.config import TenantLimits, TenantsConfig, TierPrice
from causeway_server.cloud_pool.accounts.tenants.rate_limiter import TenantRateLimiter
from causeway_server.cloud_pool.accounts.tenants.usage import UsageRecorder
from causeway_server.cloud_pool.jobs.metrics import JobMetrics
from causeway_server.cloud_pool.jobs.worker.execution import WorkerSlots
from causeway_server.cloud_pool.jobs.worker.runner import JobRun, MeteredRunner
from causeway_server.cloud_pool.jobs.worker.worker import Worker
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.job_store import JobStore
from causeway_server.cloud_pool.storage.stores import JobStores
from causeway_server.router.types import Chunk

from .scripted_worker import Script, ScriptedRunner, answers

NOW = 1_800_000_000.0
RUN_PICO_USD = 200_000_000  # of one run of `answers`: two tokens
MOST_PICO_USD = 10_000_000_000  # of the 100 tokens that a run may have
PRICE = TierPrice(tier="large", output=100)


class Books:
    """Accounts of one worker. The usage and the budget belong to `tenant`s of their own Redis keys."""

    def __init__(self, url: str, usd_per_day: float = 0.0, audit: str = "") -> None:
        self.client = redis.asyncio.Redis.from_url(url)
        config = TenantsConfig(default=TenantLimits(usd_per_day=usd_per_day), prices=(PRICE,), redis_timeout_s=20.0)
        self.usage = UsageRecorder(config, self.client, wall_clock=lambda: NOW)
        limiter = TenantRateLimiter(config, self.client, wall_clock=lambda: NOW, now_s=lambda: NOW)
        self.audit = AuditLog(audit)
        self.audit.start()
        self.ledger = Ledger(config, limiter, self.usage, self.audit, TenantMetrics(CollectorRegistry()))

    def runner(self, script: Script = answers) -> MeteredRunner:
        return self.metered(ScriptedRunner(script))

    def metered(self, runner: ScriptedRunner) -> MeteredRunner:
        return MeteredRunner(runner, self.ledger)

    def audited(self, path: Path) -> list[dict[str, object]]:
        self.audit.close()
        return [msgspec.json.decode(row) for row in path.read_bytes().splitlines()]


class PrintingStore(JobStore):
    """Prints the id of each job whose answer it has stored."""

    async def succeed(self, job: str, *arguments: object, **named: object) -> bool:
        accepted = await super().succeed(job, *arguments, **named)  # type: ignore[arg-type]
        print(job, flush=True)
        return accepted


async def prints_and_hangs(_at: int, job_run: JobRun) -> AsyncGenerator[Chunk, None]:
    yield Chunk(text="two", tokens=2)
    print(job_run.record.id, flush=True)
    await anyio.sleep_forever()


async def main(url: str, prefix: str, when: str) -> None:
    config = JobsConfig(redis=url, key_prefix=prefix, lease_s=4.0)
    database = JobStores.open(config, lambda: NOW).database
    store = PrintingStore(database, config)
    runner = Books(url, usd_per_day=10.0).runner(answers if when == "after" else prints_and_hangs)
    await Worker(store, runner, {"large": WorkerSlots("large", 4)}, config, JobMetrics(CollectorRegistry())).run(
        anyio.Event()
    )


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
