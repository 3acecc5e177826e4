"""A real Redis for the session; each test has its own key prefix and a clock that it moves."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.job_store import JobStore
from causeway_server.cloud_pool.storage.record import NewJob
from causeway_server.cloud_pool.storage.redis_client import RedisClient
from causeway_server.cloud_pool.storage.stores import JobStores

from .redis_server import RedisServer

PATIENCE_S = 60.0
_prefixes = itertools.count()
BODY = b'{"model":"large","messages":[{"role":"user","content":"a secret question"}]}'


class Clock:
    """Unix seconds, moved by hand, and by `step` with each reading."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0
        self.step = 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


async def until(condition: Callable[[], Awaitable[bool]], patience_s: float = PATIENCE_S) -> None:
    """Wait for a condition that background tasks fulfil."""
    ends = time.monotonic() + patience_s
    while not await condition():
        assert time.monotonic() < ends, "the condition did not become true"
        await asyncio.sleep(0.005)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server on PATH")
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        server = RedisServer(Path(folder))
        try:
            yield server
        finally:
            server.kill()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def config(redis_server: RedisServer) -> JobsConfig:
    return JobsConfig(
        redis=redis_server.url,
        key_prefix=f"{{t{next(_prefixes)}}}",
        lease_check_s=0.02,
        reclaim_interval_s=0.02,
        lease_s=5.0,
        backoff_s=0.001,
    )


@pytest_asyncio.fixture
async def stores(config: JobsConfig, clock: Clock) -> AsyncIterator[JobStores]:
    stores = JobStores.open(config, clock)
    yield stores
    await stores.close()


@pytest.fixture
def database(stores: JobStores) -> RedisClient:
    return stores.database


@pytest.fixture
def store(stores: JobStores) -> JobStore:
    return stores.jobs


@pytest.fixture
def new_job(clock: Clock) -> Callable[..., NewJob]:
    """Return a function that makes a job, with some values changed."""
    numbers = itertools.count(1)

    def make(**changes: object) -> NewJob:
        plain = NewJob(
            id=f"job_{next(numbers)}",
            owner="kiosk",
            tier="large",
            priority="standard",
            endpoint="/v1/chat/completions",
            body=BODY,
            deadline_ms=int(clock.now * 1000) + 3_600_000,
        )
        return msgspec.structs.replace(plain, **changes)

    return make
