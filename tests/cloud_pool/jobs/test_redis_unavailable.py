"""A worker that starts before its Redis waits, logs it, and can be stopped."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import anyio
import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry

from causeway_server.cloud_pool.background import WorkerRuntime
from causeway_server.cloud_pool.cli.jobs import dlq
from causeway_server.cloud_pool.jobs.worker.execution import WorkerSlots
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.durability import DurabilityCheck
from causeway_server.cloud_pool.storage.redis_client import RedisClient
from causeway_server.cloud_pool.storage.stores import SCRIPTS
from causeway_server.router.errors import ConfigError, JobStoreUnavailable
from tests.cloud_pool.conftest import Command
from tests.ports import free_port
from tests.waiting import until

from .redis_server import RedisServer
from .scripted_worker import ScriptedRunner, answers
from .test_api import TIER

ABSENT = "unix:///nonexistent/redis.sock"


@pytest.fixture
def stopped_redis(redis_server: RedisServer) -> Iterator[RedisServer]:
    """A Redis of this test's own that was killed."""
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        server = RedisServer(Path(folder))
        server.kill()
        server.socket.unlink()
        try:
            yield server
        finally:
            server.kill()


async def test_delays_grow_and_are_logged(stopped_redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 6:
            stopped_redis.start()

    database = RedisClient(JobsConfig(redis=stopped_redis.url, key_prefix="p"), SCRIPTS)
    with caplog.at_level(logging.INFO, "causeway_server"):
        await DurabilityCheck(database, "require", sleep=sleep, rng=lambda: 0.0).wait()
    await database.close()
    assert pauses == [1.0, 2.0, 4.0, 8.0, 15.0, 15.0]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 6 + ["INFO"]
    first = caplog.messages[0]
    assert "Waiting for Redis" in first
    assert "cannot be reached: no such file or directory. Start Redis" in first
    assert "1.0 s" in first
    assert caplog.messages[-1] == "Redis answers."


async def test_jitter_at_most_halves_a_delay(stopped_redis: RedisServer) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        stopped_redis.start()

    database = RedisClient(JobsConfig(redis=stopped_redis.url, key_prefix="p"), SCRIPTS)
    await DurabilityCheck(database, "require", sleep=sleep, rng=lambda: 0.999).wait()
    await database.close()
    assert pauses == [pytest.approx(0.5, rel=0.01)]


async def test_a_redis_that_hangs_or_is_lost_is_noticed(stopped_redis: RedisServer) -> None:
    """A check that was passed does not count any more once a later one fails."""
    config = JobsConfig(redis=stopped_redis.url, key_prefix="p")
    database, hung = RedisClient(config, SCRIPTS), RedisClient(config, SCRIPTS)
    check = DurabilityCheck(database, "require")
    stopped_redis.start()
    await check.wait()
    stopped_redis.pause()
    with pytest.raises(JobStoreUnavailable, match=r"does not answer in 0\.05 s"):
        await DurabilityCheck(hung, "require", timeout_s=0.05).ensure()
    stopped_redis.kill()
    await check.ensure()
    for again in (True, False):
        with pytest.raises(JobStoreUnavailable, match="does not answer"):
            await check.ensure(again=again)
    stopped_redis.socket.unlink()
    stopped_redis.start()
    await check.ensure()
    for client in (database, hung):
        await client.close()


async def test_a_refusal_of_redis_says_why(stopped_redis: RedisServer) -> None:
    """Never with Redis's own words, which may quote a prompt."""
    stopped_redis.start()
    database = RedisClient(JobsConfig(redis=stopped_redis.url, key_prefix="p"), SCRIPTS)
    with pytest.raises(JobStoreUnavailable, match=r"refused the command: a command failed\.$"):
        await database.command("HGET", "a prompt")
    await database.command("CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(JobStoreUnavailable, match=r"refused the command: its memory is full \(maxmemory\)\.$"):
        await database.command("SET", "key", "a prompt")
    await database.command("ACL", "SETUSER", "default", "-get")
    with pytest.raises(JobStoreUnavailable, match=r"refused the command: its user lacks the permission \(ACL\)\.$"):
        await database.command("GET", "key")
    await database.close()


async def test_a_waiting_worker_stops_at_once() -> None:
    runtime = WorkerRuntime(
        JobsConfig(redis=ABSENT),
        {"large": TIER},
        ScriptedRunner(answers),
        {"large": WorkerSlots("large", 1)},
        CollectorRegistry(),
    )
    stop = anyio.Event()
    starting = asyncio.create_task(runtime.start(stop))
    for _ in range(10):
        await asyncio.sleep(0)
    stop.set()
    assert await starting is False
    await runtime.close()


async def test_a_redis_that_is_not_durable_ends_the_worker(redis_server: RedisServer) -> None:
    """The error names the settings to change."""
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        server = RedisServer(Path(folder), "--appendfsync", "everysec")
        runtime = WorkerRuntime(
            JobsConfig(redis=server.url),
            {"large": TIER},
            ScriptedRunner(answers),
            {"large": WorkerSlots("large", 1)},
            CollectorRegistry(),
        )
        try:
            with pytest.raises(ConfigError, match="appendfsync is everysec"):
                await runtime.start(anyio.Event())
        finally:
            await runtime.close()
            server.kill()


def worker(redis: RedisServer) -> Command:
    return Command("worker", "--redis", redis.url, "--triton", "127.0.0.1:1", "--operator-port", "0")


@pytest.mark.redis
async def test_the_command_waits_for_redis_and_then_is_ready(stopped_redis: RedisServer) -> None:
    command = worker(stopped_redis)
    try:
        await until(lambda: any("Waiting for Redis" in line for line in command.log))
        assert command.process.poll() is None
        stopped_redis.start()
        operator = (await asyncio.to_thread(command.ready))["operator"]
        async with aiohttp.ClientSession() as http, http.get(operator + "/metrics") as response:
            assert response.status == 200
    finally:
        status = command.stop()
    assert status == 0


@pytest.mark.redis
async def test_sigterm_ends_a_waiting_worker_with_status_0(stopped_redis: RedisServer) -> None:
    command = worker(stopped_redis)
    try:
        await until(lambda: any("Waiting for Redis" in line for line in command.log))
    finally:
        status = command.stop()
    assert status == 0


def test_a_command_names_the_redis_that_does_not_answer() -> None:
    """Without the password of its URL."""
    url = f"redis://user:secret@127.0.0.1:{free_port()}/0"
    result = CliRunner().invoke(dlq, ["--redis", url, "list"])
    assert result.exit_code == 2
    assert url.replace("user:secret@", "") in result.output
    assert "secret" not in result.output
