"""Revoked tokens and devices on a real Redis: available, unavailable, and back without its data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import redis.asyncio
from redis.exceptions import OutOfMemoryError

from causeway_server.cloud_pool.accounts.identity.config import IdentityConfig
from causeway_server.cloud_pool.accounts.identity.revocation import (
    DEVICES_KEY,
    RevocationList,
    is_replicated,
    revoke_device,
    revoke_token,
)
from causeway_server.cloud_pool.accounts.identity.token_verifier import Claims
from causeway_server.router.errors import AuthenticationFailed, IdentityUnavailable
from causeway_server.router.serving.responses import error_response
from tests.redis_server import RedisServer, unreachable_redis

from .token_issuer import CLAIMS, NOW

pytestmark = pytest.mark.redis


def claims(**changes: object) -> Claims:
    return msgspec.convert({**CLAIMS, **changes}, Claims)


def check(revoked: RevocationList, **changes: object) -> None:
    found = claims(**changes)
    revoked.check(found.owner, found.jti, found.iat)


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
            check(each)
        await revoke_token(client, "token-1", NOW + 3600, NOW)
        for each in gateways:
            await each.refresh()
            with pytest.raises(AuthenticationFailed, match="revoked"):
                check(each)
            check(each, jti="token-2")


async def test_a_revoked_devices_tokens_are_refused(empty_redis: RedisServer) -> None:
    """Not the same name of another tenant, and not a token that is issued later."""
    async with redis.asyncio.Redis.from_url(empty_redis.url) as client:
        revoked = RevocationList(IdentityConfig(), client, wall_clock=lambda: NOW)
        await revoke_device(client, "acme/kiosk-17", NOW + 10)
        await revoked.refresh()
        with pytest.raises(AuthenticationFailed, match="revoked"):
            check(revoked)
        check(revoked, tenant="other")
        check(revoked, iat=NOW + 11)


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
                check(revoked)
                clock.now = 60.1
                if when == "allow":
                    check(revoked)
                    assert revoked.stale_accepts == 1
                    with pytest.raises(AuthenticationFailed):
                        check(revoked, jti="bad")
                else:
                    with pytest.raises(IdentityUnavailable) as caught:
                        check(revoked)
                    answer = error_response(caught.value)
                    assert (answer.status, answer.headers["Retry-After"]) == (503, "5")
            finally:
                empty_redis.start()
            await revoked.refresh()
            assert not revoked.last_error
            check(revoked)


async def test_the_copy_on_disk_is_used_at_the_start(tmp_path: Path) -> None:
    """It is as old as the last refresh of the process that wrote it. One of an older version does not say: stale."""
    copy = tmp_path / "revoked.json"
    config = IdentityConfig(revocations_file=str(copy))

    def started(read_at: float | None, config: IdentityConfig = config) -> RevocationList:
        known = "" if read_at is None else f', "read_at": {read_at}'
        copy.write_text('{"version": 3, "tokens": {"token-1": 1e12}, "devices": {}' + known + "}")
        return RevocationList(config, unreachable_redis(), wall_clock=lambda: NOW)

    with pytest.raises(AuthenticationFailed, match="revoked"):
        check(started(NOW - 59))
    check(started(NOW - 59), jti="token-2")
    for read_at in (NOW - 61, None):
        with pytest.raises(IdentityUnavailable):
            check(started(read_at), jti="token-2")
        lenient = started(read_at, msgspec.structs.replace(config, when_revocations_stale="allow"))
        check(lenient, jti="token-2")
        assert (lenient.has_copy, lenient.stale_accepts) == (True, 1)


@pytest.mark.parametrize("when", ["allow", "deny"])
@pytest.mark.parametrize("content", [None, "{"], ids=["none", "broken"])
async def test_without_any_copy_signed_tokens_are_refused(tmp_path: Path, when: str, content: str | None) -> None:
    copy = tmp_path / "revoked.json"
    if content is not None:
        copy.write_text(content)
    settings = {"revocations_file": str(copy), "when_revocations_stale": when}
    revoked = RevocationList(msgspec.convert(settings, IdentityConfig), unreachable_redis())
    await revoked.refresh()
    assert not revoked.has_copy
    with pytest.raises(IdentityUnavailable):
        check(revoked)


async def test_an_unchanged_copy_on_disk_stays_fresh(empty_redis: RedisServer, tmp_path: Path) -> None:
    """A gateway that restarts while Redis is away has a copy as old as its last refresh, not as the last revocation."""
    now = Clock()
    config = IdentityConfig(revocations_file=str(tmp_path / "revoked.json"))
    async with redis.asyncio.Redis.from_url(empty_redis.url) as client:
        gateway = RevocationList(config, client, clock=now, wall_clock=lambda: NOW + now.now)
        for now.now in (0.0, 40.0, 80.0):
            await gateway.refresh()
    check(RevocationList(config, unreachable_redis(), wall_clock=lambda: NOW + 90.0))


async def test_a_full_redis_serves_the_revocations(tmp_path: Path) -> None:
    """It refuses each command of a transaction: a gateway that starts now must read the list all the same, and an
    operator must be able to add to it."""
    full = RedisServer(tmp_path, "--maxmemory-policy", "noeviction")
    try:
        async with redis.asyncio.Redis.from_url(full.url) as client:
            await revoke_token(client, "token-1", NOW + 3600, NOW)
            await client.config_set("maxmemory", "1")
            with pytest.raises(OutOfMemoryError):
                await client.set("something", "else")
            started = RevocationList(IdentityConfig(), client, wall_clock=lambda: NOW)
            await started.refresh()
            with pytest.raises(AuthenticationFailed, match="revoked"):
                check(started)
            check(started, jti="token-2")
            await revoke_token(client, "token-2", NOW + 3600, NOW)
            await revoke_device(client, "acme/kiosk-18", NOW)
            assert await is_replicated(client, 0, 1.0)
            await started.refresh()
            with pytest.raises(AuthenticationFailed, match="revoked"):
                check(started, jti="token-2")
            assert set(started.current.devices) == {"acme/kiosk-18"}
            await client.flushall()  # and what it loses is written back
            await started.refresh()
            assert started.restored == 3
    finally:
        full.kill()


async def test_the_copy_on_disk_is_updated(empty_redis: RedisServer, tmp_path: Path) -> None:
    copy = tmp_path / "revoked.json"
    config = IdentityConfig(revocations_file=str(copy))
    async with redis.asyncio.Redis.from_url(empty_redis.url) as client:
        await revoke_token(client, "token-1", NOW + 3600, NOW)
        await RevocationList(config, client, wall_clock=lambda: NOW).refresh()
    with pytest.raises(AuthenticationFailed, match="revoked"):
        check(RevocationList(config, unreachable_redis()))


def test_without_redis_there_are_no_revocations() -> None:
    revoked = RevocationList(IdentityConfig(when_revocations_stale="deny"), None)
    check(revoked)
    assert revoked.stale_accepts == 0


# --- failovers --------------------------------------------------------------------------------------------------------


class Failover:
    """A master and a replica that stops to follow it; `fail_over` makes a client use the replica."""

    def __init__(self, folder: Path) -> None:
        for name in ("master", "replica"):
            (folder / name).mkdir()
        self.master = RedisServer(folder / "master", "--repl-diskless-sync-delay", "0")
        self.replica = RedisServer(folder / "replica", "--replicaof", f"127.0.0.1 {self.master.port}")

    async def stop_following(self) -> None:
        """Wait until the replica has everything; it gets nothing that comes later."""
        async with redis.asyncio.Redis.from_url(self.master.url) as client, client.pipeline(transaction=False) as pipe:
            replicas = 0
            while not replicas:  # WAIT is about the writes of its own connection
                pipe.set("mark", "")
                pipe.wait(1, 1000)
                _, replicas = await pipe.execute()
        async with redis.asyncio.Redis.from_url(self.replica.url) as client:
            await client.replicaof("NO", "ONE")

    async def fail_over(self, client: redis.asyncio.Redis) -> None:
        await client.connection_pool.disconnect()
        client.connection_pool.reset()  # type: ignore[no-untyped-call]
        client.connection_pool.connection_kwargs["port"] = self.replica.port
        self.master.kill()


@pytest.fixture
def failover(tmp_path: Path) -> Iterator[Failover]:
    made = Failover(tmp_path)
    try:
        yield made
    finally:
        made.master.kill()
        made.replica.kill()


async def test_a_failover_hides_no_revocation(failover: Failover) -> None:
    """The promoted replica lacks one, and the next one brings it to the version that gateways have seen already."""
    async with redis.asyncio.Redis.from_url(failover.master.url) as client:
        gateway = RevocationList(IdentityConfig(), client, wall_clock=lambda: NOW)
        await revoke_token(client, "first", NOW + 3600, NOW)
        await failover.stop_following()
        await revoke_token(client, "lost", NOW + 3600, NOW)
        await revoke_device(client, "acme/lost", NOW)
        await gateway.refresh()
        seen = gateway.current.position
        await failover.fail_over(client)
        await revoke_token(client, "after", NOW + 3600, NOW)
        await revoke_device(client, "acme/after", NOW)
        await gateway.refresh()
        assert set(gateway.current.tokens) == {"first", "lost", "after"}
        assert set(gateway.current.devices) == {"acme/lost", "acme/after"}
        assert gateway.current.position >= seen
        assert gateway.restored == 2
        await gateway.refresh()
        assert gateway.current.position > seen
        # Redis has them all again, for a gateway that starts now without a copy.
        started = RevocationList(IdentityConfig(), client, wall_clock=lambda: NOW)
        await started.refresh()
        assert started.current == gateway.current
        assert (gateway.restored, started.restored) == (2, 0)


async def test_an_older_replica_alone_is_noticed(failover: Failover) -> None:
    """Nothing is revoked after the failover: the version that Redis has is older than the one that was seen."""
    async with redis.asyncio.Redis.from_url(failover.master.url) as client:
        gateway = RevocationList(IdentityConfig(), client, wall_clock=lambda: NOW)
        await failover.stop_following()
        await revoke_device(client, "acme/kiosk-17", NOW)
        await gateway.refresh()
        await failover.fail_over(client)
        for _ in range(2):
            await gateway.refresh()
            with pytest.raises(AuthenticationFailed, match="revoked"):
                check(gateway)
        started = RevocationList(IdentityConfig(), client, wall_clock=lambda: NOW)
        await started.refresh()
        with pytest.raises(AuthenticationFailed, match="revoked"):
            check(started)


async def test_a_restarted_gateway_restores_what_its_copy_on_disk_knows(
    empty_redis: RedisServer, tmp_path: Path
) -> None:
    """All gateways restarted, and Redis lost everything: the copy on disk remembers epoch and version, too."""
    config = IdentityConfig(revocations_file=str(tmp_path / "revoked.json"))
    async with redis.asyncio.Redis.from_url(empty_redis.url) as client:
        before = RevocationList(config, client, wall_clock=lambda: NOW)
        await revoke_device(client, "acme/kiosk-17", NOW)
        await before.refresh()
        await client.flushall()
        after = RevocationList(config, client, wall_clock=lambda: NOW)
        await after.refresh()
        await after.refresh()
        assert after.restored == 1
        assert after.current.position > before.current.position
        other = RevocationList(IdentityConfig(), client, wall_clock=lambda: NOW)
        await other.refresh()
        with pytest.raises(AuthenticationFailed, match="revoked"):
            check(other)


async def test_a_restored_revocation_does_not_hide_a_later_one(empty_redis: RedisServer) -> None:
    async with redis.asyncio.Redis.from_url(empty_redis.url) as client:
        gateway = RevocationList(IdentityConfig(), client, wall_clock=lambda: NOW)
        await revoke_device(client, "acme/kiosk-17", NOW)
        await revoke_token(client, "lost", NOW + 3600, NOW)
        await gateway.refresh()
        await client.flushall()
        await revoke_device(client, "acme/kiosk-17", NOW + 60)
        for _ in range(2):
            await gateway.refresh()
        assert gateway.current.devices == {"acme/kiosk-17": NOW + 60}
        assert await client.hgetall(DEVICES_KEY) == {b"acme/kiosk-17": str(NOW + 60).encode()}


async def test_expired_tokens_are_not_restored(empty_redis: RedisServer) -> None:
    """The command that revokes forgets them by its own clock, which may be ahead."""
    async with redis.asyncio.Redis.from_url(empty_redis.url) as client:
        gateway = RevocationList(IdentityConfig(), client, wall_clock=lambda: NOW)
        await revoke_token(client, "expired", NOW - 590, NOW - 1000)
        await gateway.refresh()
        await revoke_token(client, "other", NOW + 3600, NOW + 60)
        await gateway.refresh()
        assert gateway.restored == 0
