"""Revoked tokens and devices on a real Redis: available, unavailable, and back without its data."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import redis.asyncio

from cloud_pool.accounts.identity.claims import Claims
from cloud_pool.accounts.identity.config import IdentityConfig
from cloud_pool.accounts.identity.revocation import RevocationList, revoke_device, revoke_token
from cloud_pool.http.responses import error_response
from router.errors import AuthenticationFailed, IdentityUnavailable
from tests.redis_server import RedisServer, unreachable_redis

from .token_issuer import CLAIMS, NOW

pytestmark = pytest.mark.redis


def claims(**changes: object) -> Claims:
    return msgspec.convert({**CLAIMS, **changes}, Claims)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_a_revoked_token_is_refused_by_every_gateway(empty_redis: RedisServer) -> None:
    async with redis.asyncio.Redis.from_url(empty_redis.url) as client:
        gateways = [RevocationList(IdentityConfig(), client, wall_clock=lambda: NOW) for _ in range(2)]
        for each in gateways:
            await each.refresh()
            each.check(claims())
        await revoke_token(client, "token-1", NOW + 3600, NOW)
        for each in gateways:
            await each.refresh()
            with pytest.raises(AuthenticationFailed, match="revoked"):
                each.check(claims())
            each.check(claims(jti="token-2"))


async def test_a_revoked_devices_tokens_are_refused(empty_redis: RedisServer) -> None:
    """Not the same name of another tenant, and not a token that is issued later."""
    async with redis.asyncio.Redis.from_url(empty_redis.url) as client:
        revoked = RevocationList(IdentityConfig(), client, wall_clock=lambda: NOW)
        await revoke_device(client, "acme/kiosk-17", NOW + 10)
        await revoked.refresh()
        with pytest.raises(AuthenticationFailed, match="revoked"):
            revoked.check(claims())
        revoked.check(claims(tenant="other"))
        revoked.check(claims(iat=NOW + 11))


async def test_revocations_of_expired_tokens_are_forgotten(empty_redis: RedisServer) -> None:
    async with redis.asyncio.Redis.from_url(empty_redis.url) as client:
        now = [NOW]
        revoked = RevocationList(IdentityConfig(), client, wall_clock=lambda: now[0])
        await revoke_token(client, "old", NOW + 60, NOW)
        await revoked.refresh()
        assert set(revoked.current.tokens) == {"old"}
        now[0] = NOW + 7200
        await revoke_token(client, "new", NOW + 9000, NOW + 7200)
        await revoked.refresh()
        assert set(revoked.current.tokens) == {"new"}


async def test_a_redis_that_lost_its_data_unrevokes_nothing(empty_redis: RedisServer) -> None:
    async with redis.asyncio.Redis.from_url(empty_redis.url) as client:
        revoked = RevocationList(IdentityConfig(), client, wall_clock=lambda: NOW)
        await revoke_token(client, "token-1", NOW + 3600, NOW)
        await revoke_device(client, "acme/lost", NOW)
        await revoked.refresh()
        await client.flushall()
        await revoked.refresh()
        await revoke_token(client, "token-2", NOW + 3600, NOW)
        await revoked.refresh()
        assert set(revoked.current.tokens) == {"token-1", "token-2"}
        assert set(revoked.current.devices) == {"acme/lost"}


async def test_a_stale_copy_is_used_or_refused(empty_redis: RedisServer) -> None:
    """allow accepts the rest and counts it; deny answers 503 with Retry-After."""
    clock = Clock()
    for when in ("allow", "deny"):
        clock.now = 0.0
        config = msgspec.convert({"when_revocations_stale": when, "revocations_max_age_s": 60.0}, IdentityConfig)
        empty_redis.flush()
        async with redis.asyncio.Redis.from_url(empty_redis.url, retry=None) as client:
            revoked = RevocationList(config, client, clock=clock, wall_clock=lambda: NOW)
            await revoke_token(client, "bad", NOW + 3600, NOW)
            await revoked.refresh()
            empty_redis.kill()
            try:
                await revoked.refresh()
                assert revoked.last_error
                clock.now = 60.0
                revoked.check(claims())
                clock.now = 60.1
                if when == "allow":
                    revoked.check(claims())
                    assert revoked.stale_accepts == 1
                    with pytest.raises(AuthenticationFailed):
                        revoked.check(claims(jti="bad"))
                else:
                    with pytest.raises(IdentityUnavailable) as caught:
                        revoked.check(claims())
                    answer = error_response(caught.value)
                    assert (answer.status, answer.headers["retry-after"]) == (503, "5")
            finally:
                empty_redis.start()
            await revoked.refresh()
            assert not revoked.last_error
            revoked.check(claims())


async def test_the_copy_on_disk_is_used_at_the_start(tmp_path: Path) -> None:
    """Without a copy, deny refuses; a broken copy is ignored."""
    closed = RevocationList(IdentityConfig(when_revocations_stale="deny"), unreachable_redis())
    await closed.refresh()
    with pytest.raises(IdentityUnavailable):
        closed.check(claims())
    copy = tmp_path / "revoked.json"
    copy.write_text('{"version": 3, "tokens": {"token-1": 1e12}, "devices": {}}')
    started = RevocationList(IdentityConfig(revocations_file=str(copy)), unreachable_redis())
    with pytest.raises(AuthenticationFailed, match="revoked"):
        started.check(claims())
    copy.write_text("{")
    RevocationList(IdentityConfig(revocations_file=str(copy)), unreachable_redis()).check(claims())


async def test_the_copy_on_disk_is_updated(empty_redis: RedisServer, tmp_path: Path) -> None:
    copy = tmp_path / "revoked.json"
    config = IdentityConfig(revocations_file=str(copy))
    async with redis.asyncio.Redis.from_url(empty_redis.url) as client:
        await revoke_token(client, "token-1", NOW + 3600, NOW)
        await RevocationList(config, client, wall_clock=lambda: NOW).refresh()
    with pytest.raises(AuthenticationFailed, match="revoked"):
        RevocationList(config, unreachable_redis()).check(claims())


def test_without_redis_there_are_no_revocations() -> None:
    revoked = RevocationList(IdentityConfig(when_revocations_stale="deny"), None)
    revoked.check(claims())
    assert revoked.stale_accepts == 0
