"""A gateway that does not know which tokens are revoked is not ready: a real Redis that is away, full, or back."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import anyio
import pytest

from causeway_server.cloud_pool.app import build, build_accounts
from causeway_server.cloud_pool.config import Config
from causeway_server.cloud_pool.http.config import OperatorConfig, ServerConfig
from causeway_server.cloud_pool.http.info_routes import Readiness
from causeway_server.cloud_pool.observability.metrics import Metrics
from tests.cloud_pool.dispatch.scripted_pool import Bed
from tests.cloud_pool.unreachable import unreachable_tier
from tests.redis_server import RedisServer

from .gateway import static_token_config
from .token_issuer import Issuer


@pytest.mark.redis
async def test_a_gateway_is_ready_once_it_has_a_copy_of_the_revocations(issuer: Issuer, tmp_path: Path) -> None:
    """Also from a Redis that is full, and from then on while Redis is away."""
    server = RedisServer(tmp_path, "--maxmemory", "1", "--maxmemory-policy", "noeviction")
    server.kill()
    try:
        accounts = build_accounts(Config(identity=issuer.config, redis=server.url), Metrics())
        readiness = Readiness({"large": Bed("a:1").pool}, 0.0, blocked=lambda: accounts.not_ready)
        await accounts.prepare()
        assert not await readiness.ready()
        assert accounts.problems == (accounts.not_ready,)
        server.start()
        await accounts.revocations.refresh()
        assert await readiness.ready()
        assert accounts.problems == ()
    finally:
        server.kill()
    await accounts.revocations.refresh()
    assert await readiness.ready()
    await accounts.close()


async def test_static_tokens_need_no_revocations(tmp_path: Path) -> None:
    config = Config(server=static_token_config(tmp_path), redis="redis://127.0.0.1:1/0")
    accounts = build_accounts(config, Metrics())
    await accounts.prepare()
    assert accounts.not_ready == ""
    await accounts.close()


async def test_readyz_says_that_the_revocations_are_missing(issuer: Issuer, tmp_path: Path) -> None:
    (tmp_path / "operators").write_text("prometheus scrape-secret\n")
    config = Config(
        server=ServerConfig(port=0),
        operator=OperatorConfig(token_file=str(tmp_path / "operators")),
        identity=issuer.config,
        tiers=(unreachable_tier(),),
        redis="redis://127.0.0.1:1/0",
    )
    headers = {"authorization": "Bearer scrape-secret"}
    async with anyio.create_task_group() as tasks, aiohttp.ClientSession(headers=headers) as http:
        app = build(config, tasks)
        await app.start()
        async with http.get(f"{app.operator_url}/readyz") as answer:
            assert answer.status == 503
            (problem,) = (await answer.json())["problems"]
        await app.stop()
    await app.close()
    assert "has not read the list of revoked tokens yet" in problem
