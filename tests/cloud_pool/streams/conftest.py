"""A real Redis and a real broker for the session; each test has its own topics."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.redis_client import RedisClient
from causeway_server.cloud_pool.streams.effects import STREAM_SCRIPTS
from tests.kafka_server import kafka_server
from tests.nats_server import NatsServer, nats_server
from tests.redis_server import RedisServer, redis_server

from .brokers import NatsBroker, RealBroker

__all__ = ["kafka_server", "nats_server", "redis_server"]
_prefixes = itertools.count()


@pytest.fixture(
    params=[
        pytest.param("nats_server", marks=pytest.mark.nats, id="nats"),
        pytest.param("kafka_server", marks=pytest.mark.kafka, id="kafka"),
    ]
)
def broker(request: pytest.FixtureRequest) -> RealBroker:
    server = request.getfixturevalue(request.param)
    if isinstance(server, NatsServer):
        return NatsBroker(server)
    from .kafka_broker import KafkaBroker

    return KafkaBroker(server)


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
