from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.accounts.identity.token_issuer import Issuer
from tests.redis_server import RedisServer


@pytest.fixture
def issuer(tmp_path: Path) -> Issuer:
    return Issuer(tmp_path)


@pytest.fixture(scope="session")
def jobs_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One that jobs are taken on."""
    server = RedisServer(tmp_path_factory.mktemp("redis"), "--maxmemory-policy", "noeviction")
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture
def empty_redis(jobs_redis: RedisServer) -> RedisServer:
    jobs_redis.flush()
    return jobs_redis
