from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser

from tests.cloud_pool.accounts.identity.token_issuer import Issuer
from tests.e2e.console.browser import browser
from tests.redis_server import RedisServer

REBOUND = "rebound.example"
"""A name of an attacker that Chromium resolves to this machine, as after DNS rebinding."""


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


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def chromium() -> AsyncIterator[Browser]:
    """Without Chromium's own checks of local networks, which other browsers and older ones lack."""
    rebinding = f"--host-resolver-rules=MAP {REBOUND} 127.0.0.1"
    async with browser(rebinding, "--disable-features=LocalNetworkAccessChecks") as running:
        yield running
