"""What operators read where a Redis is away: the service, its address without the password, and what to do."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import anyio
import pytest
from click.testing import CliRunner
from redis.exceptions import BusyLoadingError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from causeway_server.cloud_pool.accounts.tenants.config import TenantLimits, TenantsConfig
from causeway_server.cloud_pool.app import build
from causeway_server.cloud_pool.cache.config import CacheConfig
from causeway_server.cloud_pool.cli.erase import erase
from causeway_server.cloud_pool.cli.jobs import dlq, jobs
from causeway_server.cloud_pool.cli.keys import keys
from causeway_server.cloud_pool.cli.usage import usage_command
from causeway_server.cloud_pool.config import Config
from causeway_server.cloud_pool.http.config import ServerConfig
from causeway_server.cloud_pool.redis.connect import redis_fault
from tests.cloud_pool.unreachable import unreachable_tier
from tests.ports import free_port
from tests.redis_server import RedisServer, redis_server
from tests.waiting import until

__all__ = ["redis_server"]

PASSWORD = "hush-hush"
COMMANDS = {
    "dlq list": (dlq, ["--redis", "URL", "list"]),
    "dlq retry": (dlq, ["--redis", "URL", "retry", "--all"]),
    "dlq purge": (dlq, ["--redis", "URL", "purge", "job_1"]),
    "jobs reconcile": (jobs, ["reconcile", "--redis", "URL", "AUDIT"]),
    "usage": (usage_command, ["acme", "--redis", "URL"]),
    "erase": (erase, ["--redis", "URL", "--tenant", "acme", "--dry-run"]),
    "keys revoke": (keys, ["revoke", "--redis", "URL", "--device", "acme/kiosk"]),
    "keys show": (keys, ["show", "--config", "CONFIG"]),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_names_the_redis_that_is_away(name: str, tmp_path: Path) -> None:
    command, arguments = COMMANDS[name]
    port = free_port()
    (tmp_path / "audit").touch()
    url = f"redis://user:{PASSWORD}@127.0.0.1:{port}/0"
    (tmp_path / "gateway.yaml").write_text(f"redis: {url}\n")
    known = {"URL": url, "AUDIT": str(tmp_path / "audit"), "CONFIG": str(tmp_path / "gateway.yaml")}
    ran = CliRunner().invoke(command, [known.get(word, word) for word in arguments])
    assert ran.exit_code == 2
    assert ran.output == (
        f"causeway-cloud: Redis at redis://127.0.0.1:{port}/0 cannot be reached: connection refused. Start Redis, or "
        "correct its address (`redis` in the configuration, or --redis).\n"
    )


@pytest.mark.redis
@pytest.mark.parametrize("name", ["dlq list", "usage", "erase"])
def test_a_command_says_that_a_password_is_wrong(name: str, redis_server: RedisServer) -> None:
    command, arguments = COMMANDS[name]
    url = redis_server.url.replace("redis://", f"redis://nobody:{PASSWORD}@")
    ran = CliRunner().invoke(command, [url if word == "URL" else word for word in arguments])
    assert ran.exit_code == 2
    assert "refuses the login" in ran.output
    assert "Correct the user and the password" in ran.output
    assert PASSWORD not in ran.output


async def test_a_gateway_names_the_redis_that_is_away_to_operators_alone(caplog: pytest.LogCaptureFixture) -> None:
    """In every line of its log and in the operators' /readyz; a client learns that jobs are refused, and no address."""
    port = free_port()
    config = Config(
        server=ServerConfig(port=0),
        tiers=(unreachable_tier(),),
        redis=f"redis://user:{PASSWORD}@127.0.0.1:{port}/0",
        cache=CacheConfig(enabled=True),
        tenants=TenantsConfig(default=TenantLimits(requests_per_s=5.0)),
    )
    ask = {"model": "large", "messages": [{"role": "user", "content": "hello"}], "temperature": 0}
    async with anyio.create_task_group() as tasks:
        app = build(config, tasks)
        await app.start()
        async with aiohttp.ClientSession() as http:
            async with http.post(f"{app.url}/chat/completions", json=ask) as answer:
                assert answer.status == 503

            async def refused() -> str:
                async with http.get(f"{app.operator_url}/readyz") as answer:
                    return str((await answer.json())["jobs_refused"])

            while not (reason := await refused()):  # noqa: ASYNC110  of a task of the gateway
                await asyncio.sleep(0.02)
            async with http.post(f"{app.url}/jobs", json=ask) as answer:
                to_client = (answer.status, await answer.text())
        await until(lambda: len([record for record in caplog.records if "Redis" in record.getMessage()]) >= 5)
        await app.stop()
    await app.close()
    away = f"Redis at redis://127.0.0.1:{port}/0 cannot be reached: connection refused. Start Redis"
    assert reason.startswith(away)
    assert (to_client[0], str(port) in to_client[1]) == (503, False)
    about_redis = [line for record in caplog.records if "Redis" in (line := record.getMessage())]
    assert {away in line for line in about_redis} == {True}
    assert not [line for line in caplog.messages if "Error 111" in line or PASSWORD in line]
    assert len(about_redis) == len(set(about_redis))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RedisTimeoutError("Timeout reading from x"), "does not answer in time"),
        (TimeoutError(), "does not answer in time"),
        (BusyLoadingError("Redis is loading the dataset in memory"), "is still loading its data"),
        (ResponseError("OOM command not allowed"), "answers with an error: OOM"),
        (ConnectionResetError(104, "x"), "cannot be reached: connection reset by peer"),
    ],
)
def test_each_fault_says_what_is_wrong(error: Exception, words: str) -> None:
    assert f"Redis at a:1 {words}" in redis_fault(error, "a:1")
