from __future__ import annotations

from pathlib import Path

import pytest

from tests.redis_server import RedisServer
from tests.redis_server import redis_server as redis_server  # a fixture

from .token_issuer import Issuer


@pytest.fixture
def issuer(tmp_path: Path) -> Issuer:
    return Issuer(tmp_path)


@pytest.fixture
def empty_redis(redis_server: RedisServer) -> RedisServer:
    """The session's Redis, without data."""
    redis_server.flush()
    return redis_server
