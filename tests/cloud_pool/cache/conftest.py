"""A real Redis; each test has its own keys in it and moves its own clock."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator

import pytest

from causeway_server.cloud_pool.cache.config import CacheConfig
from tests.redis_server import RedisServer

from .gateways import Clock

_prefixes = itertools.count()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server here")
    server = RedisServer(tmp_path_factory.mktemp("redis"), "--appendonly", "no")
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def config() -> CacheConfig:
    """A short lease, so that followers poll often, and a patient Redis timeout for a busy machine."""
    return CacheConfig(
        enabled=True,
        key_prefix=f"t{next(_prefixes)}",
        redis_timeout_s=5.0,
        lease_s=0.06,
        ttl_s=60.0,
        stale_if_error_s=600.0,
    )
