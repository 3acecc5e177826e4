"""`python -m tests.bench job-queues`: one tenant has 20,000 jobs queued. What do they cost, and whom do they delay?

1. Its daily budget is spent, so the jobs wait for the next day. Beyond what the idle processes use, they cost at most
   MAX_CORE of a core, workers, gateways and Redis together, and MAX_COMMANDS commands of Redis a second, those of
   scripts included. The measurement takes two minutes by default, because a blocked tenant tries a job once a minute.
2. It has a budget, and the workers are busy with its jobs. Another tenant submits TEN at once, as before on the idle
   bed. The last of them ends later by at most one service time, the longest time that one job runs.

The replica is as wide as both workers together, so jobs wait in the queue of jobs alone. Times are those of the jobs'
records, by Redis's clock.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable

import aiohttp
import anyio
import msgspec
import psutil
import redis.asyncio

from causeway_server.cloud_pool.accounts.ledger import BYTES_PER_TOKEN
from causeway_server.cloud_pool.accounts.tenants.usage import tenant_key
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.record import JobRecord, NewJob
from causeway_server.cloud_pool.storage.stores import JobStores
from tests.bench.rows import Row, checks

from .bed import Bed, ReplicaSpeed, running_bed
from .client import body_of, new_mark
from .figures import table

MAX_CORE = 0.01
MAX_COMMANDS = 20.0
TEN = 10
TIER = "assistant-large"
TOKENS = 20
SPEED = ReplicaSpeed(slots=16, prefill_s=0.1, step_s=0.05)
"""A job takes 1.05 s."""
DAY_MS = 86_400_000
PATIENCE_S = 120.0
BROKE, FLOOD, QUIET = "broke", "flood", "quiet"
CONFIG = {
    "tenants": {"overrides": [{"name": BROKE, "usd_per_day": 1.0}], "prices": [{"tier": TIER, "output": 10}]},
    "audit_file": "audit.jsonl",
}


class Costs(msgspec.Struct, frozen=True):
    """What the processes used over some seconds, per second."""

    workers: float  # cores
    gateways: float
    redis: float
    commands: float

    @property
    def cores(self) -> float:
        return self.workers + self.gateways + self.redis


async def fill(stores: JobStores, owner: str, count: int) -> None:
    """Queue jobs past the API, which would refuse a budget that is spent or a rate that is exceeded."""
    now_ms = await stores.database.now_ms()
    body = msgspec.json.encode(body_of(new_mark(), TIER, TOKENS, stream=False))
    numbers = iter(range(count))

    async def accept_some() -> None:
        for number in numbers:
            job = NewJob(
                id=f"job_{owner.replace('/', '_')}_{number}",
                owner=owner,
                tier=TIER,
                priority="standard",
                endpoint="/v1/chat/completions",
                body=body,
                deadline_ms=now_ms + DAY_MS,
                tokens=len(body) / BYTES_PER_TOKEN + TOKENS,  # as the API estimates it
            )
            await stores.jobs.accept(job)

    async with anyio.create_task_group() as tasks:
        for _ in range(64):
            tasks.start_soon(accept_some)


async def measure_costs(bed: Bed, client: redis.asyncio.Redis, seconds: float) -> Costs:
    processes = {name: psutil.Process(bed.process(name).popen.pid) for name in bed.names}
    server = psutil.Process((await client.info("server"))["process_id"])

    async def read() -> tuple[dict[str, float], float, float]:
        by_kind = {"worker": 0.0, "gateway": 0.0}
        for name, process in processes.items():
            by_kind[name.partition("-")[0]] += _cpu_s(process)
        return by_kind, _cpu_s(server), float((await client.info("stats"))["total_commands_processed"])

    began = time.monotonic()
    before, redis_before, commands_before = await read()
    await asyncio.sleep(seconds)
    after, redis_after, commands_after = await read()
    took = time.monotonic() - began
    return Costs(
        workers=(after["worker"] - before["worker"]) / took,
        gateways=(after["gateway"] - before["gateway"]) / took,
        redis=(redis_after - redis_before) / took,
        commands=(commands_after - commands_before) / took,
    )


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def wait_until(condition: Callable[[], Awaitable[bool]]) -> None:
    ends = time.monotonic() + PATIENCE_S
    while not await condition():
        if time.monotonic() > ends:
            raise RuntimeError(f"{condition.__name__}: not within {PATIENCE_S:g} s")
        await asyncio.sleep(0.1)


async def parked(bed: Bed, stores: JobStores, client: redis.asyncio.Redis, jobs: int, seconds: float) -> list[str]:
    """(1)"""
    idle = await measure_costs(bed, client, seconds)
    day = time.strftime("%Y-%m-%d", time.gmtime())
    await client.hset(tenant_key(BROKE, f"usage:{day}"), "pico_usd", str(10**9))
    await fill(stores, f"{BROKE}/device", jobs)

    async def all_parked() -> bool:
        depths = await stores.jobs.depths()
        # A worker whose check of the budget times out on a busy machine runs some jobs within its local share.
        return depths.parked > 0.9 * jobs and not any(queue.queued or queue.running for queue in depths.queues)

    await wait_until(all_parked)
    costs = await measure_costs(bed, client, seconds)
    rows = [("idle", idle), (f"{jobs} parked jobs", costs)]
    heads = ("", "workers, cores", "gateways", "redis", "all", "commands/s")
    print(table(heads, [[name, *_cores(each), f"{each.commands:.1f}"] for name, each in rows]))
    audit = bed.folder / "audit.jsonl"  # exists from the first record on
    audited = audit.read_text().count(f'"tenant":"{BROKE}"') if audit.exists() else 0
    first = await client.xlen(stores.database.key("events", f"job_{BROKE}_device_0"))
    print(f"audit records of these jobs: {audited}; events of the first: {first}")
    core, commands = costs.cores - idle.cores, costs.commands - idle.commands
    print(f"parked jobs cost {core:+.2%} of a core and {commands:+.1f} commands/s")
    failures = [f"parked jobs cost {core:.2%} of a core"] if core > MAX_CORE else []
    return failures + ([f"parked jobs cost {commands:.1f} commands/s"] if commands > MAX_COMMANDS else [])


def _cores(costs: Costs) -> list[str]:
    return [f"{share:.2%}" for share in (costs.workers, costs.gateways, costs.redis, costs.cores)]


async def ten(bed: Bed, session: aiohttp.ClientSession, stores: JobStores) -> list[JobRecord]:
    """Submit ten jobs at once and return their records when they have ended."""
    headers = {"authorization": f"Bearer {bed.token(QUIET)}"}

    async def submit(number: int) -> str:
        body = body_of(new_mark(), TIER, TOKENS, stream=False)
        async with session.post(f"{bed.urls[number % 2]}/v1/jobs", json=body, headers=headers) as reply:
            assert reply.status == 202, await reply.text()
            return str((await reply.json())["id"])

    ids = await asyncio.gather(*(submit(number) for number in range(TEN)))
    records: list[JobRecord] = []

    async def ended() -> bool:
        records[:] = [await stores.jobs.get(job, f"{QUIET}/kiosk") for job in ids]
        return all(record.ended for record in records)

    await wait_until(ended)
    return records


def last_end_s(records: list[JobRecord]) -> float:
    return max(record.finished or 0 for record in records) / 1000.0 - min(record.created for record in records) / 1000.0


def service_s(records: list[JobRecord]) -> float:
    return max((record.finished or 0) - (record.started or 0) for record in records) / 1000.0


async def delays(bed: Bed, stores: JobStores, jobs: int, rounds: int) -> list[str]:
    """(2)"""
    async with aiohttp.ClientSession() as session:
        alone = [await ten(bed, session, stores) for _ in range(rounds)]
        await fill(stores, f"{FLOOD}/device", jobs)
        beside = [await ten(bed, session, stores) for _ in range(rounds)]
    longest = max(service_s(records) for records in beside)
    undisturbed = sum(map(last_end_s, alone)) / rounds
    heads = ("", "last of ten ends after s, mean", "worst", "longest service time s")
    rows = [
        (name, sum(map(last_end_s, each)) / rounds, max(map(last_end_s, each)), max(map(service_s, each)))
        for name, each in (("alone", alone), (f"beside {jobs} jobs", beside))
    ]
    print(table(heads, [[name, *(f"{value:.2f}" for value in values)] for name, *values in rows]))
    worst = max(map(last_end_s, beside)) - undisturbed
    print(f"delayed by {worst:.2f} s at worst, one service time is {longest:.2f} s")
    failed = sum(record.state != "succeeded" for records in alone + beside for record in records)
    failures = [f"{failed} jobs failed"] if failed else []
    return failures + ([f"ten jobs are delayed by {worst:.2f} s"] if worst > longest else [])


async def measure(bed: Bed, arguments: argparse.Namespace) -> list[str]:
    stores = JobStores.open(JobsConfig(redis=bed.redis.url))
    client = redis.asyncio.Redis.from_url(bed.redis.url, decode_responses=True)
    try:
        failures = await parked(bed, stores, client, arguments.jobs, arguments.seconds)
        return failures + await delays(bed, stores, arguments.jobs, arguments.rounds)
    finally:
        await client.aclose()
        await stores.close()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=20_000, help="the backlog")
    parser.add_argument("--seconds", type=float, default=120.0, help="duration of each measurement of costs")
    parser.add_argument("--rounds", type=int, default=5, help="how often ten jobs are submitted, alone and beside it")


def main(arguments: argparse.Namespace) -> list[Row]:
    jobs = {"concurrency": SPEED.slots // 2, "max_unfinished": arguments.jobs}
    with running_bed((TIER,), speed=SPEED, config=CONFIG | {"jobs": jobs}) as bed:
        failures = asyncio.run(measure(bed, arguments))
    return checks(failures)
