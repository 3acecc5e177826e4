"""Listed addresses, DNS names, and reloads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing

import anyio
import msgspec
import pytest

from causeway_server.cloud_pool.app import reload_tiers
from causeway_server.cloud_pool.config import Config
from causeway_server.cloud_pool.dispatch.config import LoadBalancingConfig
from causeway_server.cloud_pool.dispatch.discovery import EndpointDiscovery, parse_endpoint_address, resolve_dns
from causeway_server.cloud_pool.dispatch.pool import Pools
from causeway_server.cloud_pool.http.config import ServerConfig
from causeway_server.cloud_pool.tiers.config import TierConfig
from causeway_server.cloud_pool.tiers.tier import ChatFormat, Tier
from causeway_server.cloud_pool.tiers.variants import TierVariants
from causeway_server.cloud_pool.upstreams.clients import UpstreamClients
from causeway_server.router.errors import ConfigError
from tests.waiting import until


class Resolver:
    def __init__(self, **names: Sequence[str] | Exception) -> None:
        self.names: dict[str, Sequence[str] | Exception] = dict(names)
        self.asked = 0

    async def __call__(self, name: str, port: int) -> Sequence[str]:
        self.asked += 1
        await anyio.lowlevel.checkpoint()
        found = self.names[name]
        if isinstance(found, Exception):
            raise found
        return [f"{host}:{port}" for host in found]


def names(resolver: Resolver, *places: str) -> EndpointDiscovery:
    return EndpointDiscovery([parse_endpoint_address(text) for text in places], resolver)


@pytest.mark.parametrize(
    ("text", "address", "zone", "is_dns"),
    [
        ("10.0.0.7:8001", "10.0.0.7:8001", "", False),
        ("triton-0.triton:8001@eu-1a", "triton-0.triton:8001", "eu-1a", False),
        ("[::1]:8001@b", "[::1]:8001", "b", False),
        ("dns:triton.models:8001", "triton.models:8001", "", True),
        ("dns:triton.models:8001@b", "triton.models:8001", "b", True),
    ],
)
def test_endpoint_address_forms(text: str, address: str, zone: str, is_dns: bool) -> None:
    found = parse_endpoint_address(text)
    assert (found.address, found.zone, found.is_dns) == (address, zone, is_dns)


@pytest.mark.parametrize(
    "text",
    ["", "host", "host:", "host:0", "host:99999", "a b:1", "host:1@", "::1:80", "dns:[::1]:80", "dns:x", "x:1@a@b"],
)
def test_an_invalid_endpoint_address_is_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError, match="somewhere"):
        parse_endpoint_address(text, "somewhere")


async def test_dns_addresses_follow_their_name_and_listed_ones_stay() -> None:
    resolver = Resolver(pool=["10.0.0.1", "10.0.0.2"])
    found = names(resolver, "dns:pool:81@x", "fixed:82@y")
    assert found.zones() == {"fixed:82": "y"}
    await found.refresh()
    assert found.zones() == {"fixed:82": "y", "10.0.0.1:81": "x", "10.0.0.2:81": "x"}
    resolver.names["pool"] = ["10.0.0.2", "10.0.0.3"]
    await found.refresh()
    assert set(found.zones()) == {"fixed:82", "10.0.0.2:81", "10.0.0.3:81"}


@pytest.mark.parametrize("answer", [OSError("no such host"), UnicodeError("label too long"), []])
async def test_an_unresolvable_name_keeps_its_endpoints_and_is_logged_once(
    answer: Sequence[str] | Exception, caplog: pytest.LogCaptureFixture
) -> None:
    resolver = Resolver(pool=["10.0.0.1"])
    found = names(resolver, "dns:pool:81")
    await found.refresh()
    resolver.names["pool"] = answer
    for _ in range(3):
        await found.refresh()
    assert set(found.zones()) == {"10.0.0.1:81"}
    assert len(caplog.records) == (1 if isinstance(answer, Exception) else 0)


async def test_the_system_resolver_resolves_localhost() -> None:
    assert set(await resolve_dns("localhost", 81)) <= {"127.0.0.1:81", "[::1]:81"}
    with pytest.raises(OSError, match=r"."):
        await resolve_dns("no-such-name.invalid", 81)


# --- all tiers together ----------------------------------------------------------------------------------------------


def config(*endpoints: str, dns_refresh_s: float = 0.02) -> Config:
    return Config(
        server=ServerConfig(port=0),
        tiers=(TierConfig(name="t", endpoints=endpoints),),
        load_balancing=LoadBalancingConfig(dns_refresh_s=dns_refresh_s),
    )


@asynccontextmanager
async def running(start: Config, resolver: Resolver) -> AsyncIterator[tuple[Pools, UpstreamClients]]:
    async with anyio.create_task_group() as tasks:
        clients = UpstreamClients(tasks, lambda model: None)
        tiers = [Tier(tier, ChatFormat("")).endpoints for tier in start.tiers]
        pools = Pools(tiers, clients, start.load_balancing, resolve=resolver)
        await pools.prepare()
        tasks.start_soon(pools.watch)
        with anyio.fail_after(60.0):
            yield pools, clients
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await pools.close()


def addresses(pools: Pools) -> dict[str, str]:
    return {one.address: one.phase for one in pools.by_tier["t"].endpoints}


async def test_the_pool_follows_dns() -> None:
    """The first addresses are there before the first request; a later one is probed first; a removed one drains and its
    client is closed."""
    resolver = Resolver(pool=["127.0.0.1", "127.0.0.2"])
    async with running(config("dns:pool:1"), resolver) as (pools, clients):
        assert addresses(pools) == {"127.0.0.1:1": "active", "127.0.0.2:1": "active"}
        lease = pools.by_tier["t"].lease(excluding={"127.0.0.2:1"})
        idle = clients.get("127.0.0.2:1")
        resolver.names["pool"] = ["127.0.0.3"]
        await until(lambda: addresses(pools) == {"127.0.0.1:1": "draining", "127.0.0.3:1": "ejected"})
        await until(lambda: clients.get("127.0.0.2:1") is not idle)
        lease.close()
        await until(lambda: addresses(pools) == {"127.0.0.3:1": "ejected"})


async def test_a_hanging_resolver_delays_only_its_own_tier() -> None:
    class Hanging(Resolver):
        async def __call__(self, name: str, port: int) -> Sequence[str]:
            await asyncio.Event().wait()
            return []

    start = msgspec.structs.replace(
        config("a:1"), tiers=(TierConfig(name="slow", endpoints=("dns:pool:1",)), TierConfig(name="t", triton="a:1"))
    )
    async with anyio.create_task_group() as tasks:
        clients = UpstreamClients(tasks, lambda model: None)
        tiers = [Tier(tier, ChatFormat("")).endpoints for tier in start.tiers]
        pools = Pools(tiers, clients, start.load_balancing, resolve=Hanging())
        tasks.start_soon(pools.watch)
        with closing(pools.by_tier["t"].lease()) as lease:
            assert lease.endpoint == "a:1"
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await pools.close()


async def test_a_reload_adds_and_drains_endpoints() -> None:
    """What SIGHUP does; new names are resolved before requests go there."""
    resolver = Resolver(pool=["127.0.0.9"])
    start = config("127.0.0.1:1", "127.0.0.2:1", dns_refresh_s=60.0)
    async with running(start, resolver) as (pools, _):
        with closing(pools.by_tier["t"].lease(excluding={"127.0.0.2:1"})):
            reload_tiers(pools, TierVariants(), start, lambda: config("127.0.0.2:1", "dns:pool:1", dns_refresh_s=60.0))
            await until(lambda: len(addresses(pools)) == 3)
            assert addresses(pools) == {"127.0.0.1:1": "draining", "127.0.0.2:1": "active", "127.0.0.9:1": "ejected"}
        assert set(addresses(pools)) == {"127.0.0.2:1", "127.0.0.9:1"}


async def test_a_faulty_file_keeps_the_last_good_endpoints() -> None:
    def reread() -> Config:
        raise ConfigError("no", where="gateway.yaml:3")

    start = config("127.0.0.1:1")
    async with running(start, Resolver()) as (pools, _):
        with pytest.raises(ConfigError, match=r"gateway\.yaml:3"):
            reload_tiers(pools, TierVariants(), start, reread)
        await anyio.wait_all_tasks_blocked()
        assert addresses(pools) == {"127.0.0.1:1": "active"}


async def test_a_reload_warns_about_other_changed_keys(caplog: pytest.LogCaptureFixture) -> None:
    start = config("127.0.0.1:1")
    with caplog.at_level(logging.WARNING):
        async with running(start, Resolver()) as (pools, _):
            reload_tiers(pools, TierVariants(), start, lambda: config("127.0.0.1:1"))
            assert "restart" not in caplog.text
            reload_tiers(pools, TierVariants(), start, lambda: msgspec.structs.replace(start, log="debug"))
    assert "restart" in caplog.text
