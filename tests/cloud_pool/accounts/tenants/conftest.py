from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import redis.asyncio

from tests.redis_server import RedisServer
from tests.redis_server import redis_server as redis_server  # a fixture


@pytest.fixture
async def client(redis_server: RedisServer) -> AsyncIterator[redis.asyncio.Redis]:
    """An empty Redis."""
    redis_server.flush()
    async with redis.asyncio.Redis.from_url(redis_server.url, retry=None) as made:
        yield made
