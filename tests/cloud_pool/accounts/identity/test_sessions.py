"""Live sessions and accounts: each response is a request of its tenant, whose token is verified again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
import redis.asyncio

from causeway_server.cloud_pool.accounts.identity.issuing import issue
from causeway_server.cloud_pool.accounts.identity.revocation import revoke_token
from causeway_server.cloud_pool.accounts.tenants.config import TenantConfig, TenantsConfig
from causeway_server.cloud_pool.config import Config
from tests.e2e.sessions.peer import Event, Peer, done
from tests.redis_server import RedisServer
from tests.waiting import until

from .gateway import Gateway, running
from .test_over_http import audited, config, token
from .token_issuer import Issuer


@asynccontextmanager
async def sessions(settings: Config) -> AsyncIterator[Gateway]:
    async with running(settings) as gateway, anyio.create_task_group() as tasks:
        gateway.server.sessions.start(tasks)
        yield gateway
        await gateway.server.sessions.close()
        tasks.cancel_scope.cancel()


async def connect(gateway: Gateway, bearer: str) -> Peer:
    port = int(gateway.url.rpartition(":")[2])
    found = await Peer.connect(port, "model=assistant-large", headers={"Authorization": f"Bearer {bearer}"})
    await found.event()
    return found


def error(events: list[Event]) -> Event:
    """The error of a failed response."""
    response = done(events)
    assert response["status"] == "failed"
    found: Event = response["status_details"]["error"]
    return found


@pytest.mark.redis
async def test_a_revoked_token_gets_no_more_answers(issuer: Issuer, empty_redis: RedisServer) -> None:
    text, claims = issue(
        issuer.key, tenant="acme", device="k", scopes=("chat",), issuer="causeway", audience="causeway-cloud",
        now=time.time(), lifetime_s=600.0,
    )  # fmt: skip
    async with (
        redis.asyncio.Redis.from_url(empty_redis.url) as client,
        sessions(config(issuer, redis=empty_redis.url)) as gateway,
    ):
        peer = await connect(gateway, text)
        assert done(await peer.ask())["status"] == "completed"
        await revoke_token(client, claims.jti, claims.exp, time.time())
        await gateway.accounts.revocations.refresh()
        assert error(await peer.ask())["code"] == "invalid_api_key"
        assert len(gateway.service.calls) == 1
        peer.cut()


async def test_a_tenants_limits_apply_and_each_response_is_audited(issuer: Issuer, tmp_path: Path) -> None:
    path = tmp_path / "audit"
    tenants = TenantsConfig(overrides=(TenantConfig(name="acme", max_tokens=64, max_body_bytes=600),))
    async with sessions(config(issuer, tenants=tenants, audit_file=str(path))) as gateway:
        peer = await connect(gateway, token(issuer))
        assert done(await peer.ask())["status"] == "completed"
        assert error(await peer.ask(max_output_tokens=65))["code"] == "invalid_value"
        assert error(await peer.ask("x" * 600))["code"] == "body_too_large"
        assert gateway.service.calls[-1].request.max_tokens == 64
        await until(lambda: path.exists() and len(audited(path)) == 3)
        assert [record["outcome"] for record in audited(path)] == ["ok", "invalid_value", "body_too_large"]
        assert {record["route"] for record in audited(path)} == {"realtime"}
        peer.cut()


@pytest.mark.slow
async def test_a_peer_that_floods_and_reads_nothing_takes_bounded_memory(issuer: Issuer) -> None:
    """Others are served meanwhile."""
    async with sessions(config(issuer)) as gateway:
        peer = await connect(gateway, token(issuer))

        async def flood() -> None:
            while True:
                await peer.send("nonsense", event_id="x" * 500)

        flooding = asyncio.create_task(flood())
        live = gateway.server.sessions
        await until(lambda: live.stats.unsent_bytes > 64 * 1024)
        assert (await gateway.post(token(issuer)))[0] == 200
        assert live.stats.unsent_bytes < 70 * 1024
        flooding.cancel()
        peer.cut()
        await until(lambda: live.stats.cut == 1)
