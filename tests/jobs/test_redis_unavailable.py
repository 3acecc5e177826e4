"""A worker whose Redis is away when it starts: it waits and says so, and stops when it is told to."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import anyio
import pytest
from prometheus_client import CollectorRegistry

from cloud_pool.jobs.config import JobsConfig
from cloud_pool.jobs.lua.scripts import SCRIPTS
from cloud_pool.jobs.store.durability import DurabilityCheck
from cloud_pool.jobs.store.redis_client import RedisClient
from cloud_pool.jobs.worker.runtime import WorkerRuntime
from router.errors import ConfigError
from tests.cloud.conftest import Command

from .redis_server import RedisServer
from .scripted_worker import Scripted, answers
from .test_api import TIER

ABSENT = "unix:///nonexistent/redis.sock"


@pytest.fixture
def away(redis_server: RedisServer) -> Iterator[RedisServer]:
    """A Redis of this test's own that was killed."""
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        server = RedisServer(Path(folder))
        server.kill()
        server.socket.unlink()
        try:
            yield server
        finally:
            server.kill()


async def test_it_asks_again_after_longer_and_longer_pauses(
    away: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Each time is said, with the pause; when Redis is there, so is that."""
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 6:
            away.start()

    database = RedisClient(away.url, "p", SCRIPTS)
    with caplog.at_level(logging.INFO, "causeway.cloud.jobs"):
        await DurabilityCheck(database, "require", sleep=sleep, rng=lambda: 0.0).wait()
    await database.close()
    assert pauses == [1.0, 2.0, 4.0, 8.0, 15.0, 15.0]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 6 + ["INFO"]
    first = caplog.messages[0]
    assert "waiting for Redis" in first
    assert "does not answer" in first
    assert "1.0 s" in first
    assert caplog.messages[-1] == "Redis answers"


async def test_a_pause_is_never_nothing(away: RedisServer) -> None:
    """Chance shortens it by half at most: a crowd of workers spreads, and none of them spins."""
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        away.start()

    database = RedisClient(away.url, "p", SCRIPTS)
    await DurabilityCheck(database, "require", sleep=sleep, rng=lambda: 0.999).wait()
    await database.close()
    assert pauses == [pytest.approx(0.5, rel=0.01)]


async def test_one_that_waits_stops_when_told() -> None:
    """At once, in the middle of a pause, without an error."""
    crew = WorkerRuntime(
        JobsConfig(redis=ABSENT), {"large": TIER}, Scripted(answers), {"large": 1}, CollectorRegistry()
    )
    stop = anyio.Event()
    starting = asyncio.create_task(crew.start(stop))
    for _ in range(10):
        await asyncio.sleep(0)
    stop.set()
    assert await starting is False
    await crew.close()


async def test_a_redis_that_forgets_is_not_waited_for(redis_server: RedisServer) -> None:
    """That is for people to mend: the worker ends with what is to be set."""
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        server = RedisServer(Path(folder), "--appendfsync", "everysec")
        crew = WorkerRuntime(
            JobsConfig(redis=server.url), {"large": TIER}, Scripted(answers), {"large": 1}, CollectorRegistry()
        )
        try:
            with pytest.raises(ConfigError, match="appendfsync is everysec"):
                await crew.start(anyio.Event())
        finally:
            await crew.close()
            server.kill()


def worker(redis: RedisServer) -> Command:
    return Command("worker", "--redis", redis.url, "--triton", "127.0.0.1:1", "--metrics-port", "0")


@pytest.mark.redis
async def test_the_command_waits_and_then_works(away: RedisServer) -> None:
    """`causeway-cloud worker` before its Redis: it says what it waits for, and is ready once Redis is there."""
    command = worker(away)
    try:
        while not any("waiting for Redis" in line for line in command.log):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert command.process.poll() is None
        away.start()
        metrics = (await asyncio.to_thread(command.ready))["metrics"]
        async with aiohttp.ClientSession() as http, http.get(metrics) as response:
            assert response.status == 200
    finally:
        status = command.stop()
    assert status == 0


@pytest.mark.redis
async def test_the_command_stops_while_it_waits(away: RedisServer) -> None:
    """SIGTERM ends a worker that waits: status 0, as for one that worked."""
    command = worker(away)
    try:
        while not any("waiting for Redis" in line for line in command.log):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    finally:
        status = command.stop()
    assert status == 0
