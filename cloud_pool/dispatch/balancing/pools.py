"""The pools of all tiers, and the Triton clients that they share by address."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import anyio
from anyio.abc import TaskGroup

from ...upstreams.triton.client import TritonClient
from .config import LoadBalancingConfig
from .discovery import EndpointAddress, EndpointDiscovery, Resolver, TierEndpoints, resolve_dns
from .pool import Pool

_PREPARE_S = 3.0


class TritonClients:
    """Owns the clients: one for each address, for as long as a pool lists it or a call runs there."""

    def __init__(self, tasks: TaskGroup, reloaded: Callable[[str], None], *, key_file: Path | None = None) -> None:
        self._tasks = tasks
        self._reloaded = reloaded
        self._key_file = key_file
        self._clients: dict[str, TritonClient] = {}

    def get(self, address: str) -> TritonClient:
        """Return the client of this address, created on first use."""
        client = self._clients.get(address)
        if client is None:
            client = self._clients[address] = TritonClient(
                address, self._tasks, reloaded=self._reloaded, key_file=self._key_file
            )
            self._tasks.start_soon(client.check_model_control)
        return client

    async def retain(self, addresses: Iterable[str]) -> None:
        """Close the clients of all other addresses."""
        unused = self._clients.keys() - set(addresses)
        for client in [self._clients.pop(address) for address in unused]:
            await client.close()

    async def close(self) -> None:
        await self.retain(())


class Pools:
    """Call `prepare`, then run `watch` for as long as the pools are used, then `close`."""

    def __init__(
        self,
        tiers: Iterable[TierEndpoints],
        clients: TritonClients,
        settings: LoadBalancingConfig,
        *,
        zone: str = "",
        resolve: Resolver = resolve_dns,
        ejected: Callable[[str, str], None] = lambda tier, code: None,
    ) -> None:
        self._clients = clients
        self._updated = asyncio.Event()
        self._dns_refresh_s = settings.dns_refresh_s
        self._discoveries: dict[str, EndpointDiscovery] = {}
        self._pools: dict[str, Pool] = {}
        for tier in tiers:
            self._discoveries[tier.tier] = EndpointDiscovery(tier.addresses, resolve)
            self._pools[tier.tier] = Pool(tier, clients.get, settings=settings, zone=zone, ejected=ejected)

    @property
    def by_tier(self) -> Mapping[str, Pool]:
        return self._pools

    def configured(self, tier: str) -> tuple[EndpointAddress, ...]:
        """Return the tier's addresses as they are configured now, with names unresolved."""
        return self._discoveries[tier].configured

    async def prepare(self) -> None:
        """Resolve all DNS names before the first request; an unreachable resolver delays this by 3 s at most."""
        with anyio.move_on_after(_PREPARE_S):
            await self._refresh_all()

    async def watch(self) -> None:
        """Watch all pools and refresh DNS names, until cancelled."""
        async with anyio.create_task_group() as tasks:
            for pool in self._pools.values():
                tasks.start_soon(pool.watch)
            while True:
                with anyio.move_on_after(self._dns_refresh_s):
                    await self._updated.wait()
                self._updated.clear()
                await self._refresh_all()
                await self._clients.retain(self._used_addresses())

    def update_endpoints(self, addresses: Mapping[str, tuple[EndpointAddress, ...]]) -> None:
        """Take other addresses, by tier; `watch` applies them at its next turn."""
        for tier, found in addresses.items():
            if tier in self._discoveries:
                self._discoveries[tier].replace(found)
        self._updated.set()

    async def close(self) -> None:
        await self._clients.close()

    async def _refresh_all(self) -> None:
        async with anyio.create_task_group() as tasks:
            for tier, discovery in self._discoveries.items():
                tasks.start_soon(_refresh, discovery, self._pools[tier])

    def _used_addresses(self) -> set[str]:
        return {one.address for pool in self._pools.values() for one in pool.endpoints}


async def _refresh(discovery: EndpointDiscovery, pool: Pool) -> None:
    await discovery.refresh()
    # Before the first name is resolved the pool keeps what it has.
    if zones := discovery.zones():
        pool.set_endpoints(zones)
