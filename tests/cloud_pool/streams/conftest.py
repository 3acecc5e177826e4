"""A real Redis and a real broker for the session; each test has its own topics."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.redis_client import RedisClient
from causeway_server.cloud_pool.streams.effects import STREAM_SCRIPTS
from tests.nats_server import NatsServer, nats_server
from tests.redis_server import RedisServer, redis_server

from .brokers import NatsBroker

__all__ = ["nats_server", "redis_server"]
_prefixes = itertools.count()


@pytest.fixture
def broker(nats_server: NatsServer) -> NatsBroker:
    return NatsBroker(nats_server)


@pytest.fixture
def jobs(redis_server: RedisServer) -> JobsConfig:
    return JobsConfig(
        redis=redis_server.url, key_prefix=f"s{next(_prefixes)}", backoff_s=0.001, backoff_max_s=0.05, drain_s=20.0
    )


@pytest_asyncio.fixture
async def database(jobs: JobsConfig) -> AsyncIterator[RedisClient]:
    client = RedisClient(jobs, STREAM_SCRIPTS)
    yield client
    await client.close()
