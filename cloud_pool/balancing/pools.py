"""Every tier's pool, and the Triton clients that they share by address."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Mapping

import anyio
from anyio.abc import TaskGroup

from ..config.schema import Config, TierConfig
from ..config.tiers import Tier
from ..upstreams.triton.client import TritonClient
from .discovery.dns import EndpointDiscovery, Resolver, resolve_dns
from .pool import Pool

_PREPARE_S = 3.0


class TritonClients:
    """Owner of the clients: one for each address, for as long as a pool names it or a call runs there."""

    def __init__(self, tasks: TaskGroup, repaired: Callable[[str], None]) -> None:
        self._tasks = tasks
        self._repaired = repaired
        self._tritons: dict[str, TritonClient] = {}

    def at(self, address: str) -> TritonClient:
        found = self._tritons.get(address)
        if found is None:
            found = self._tritons[address] = TritonClient(address, self._tasks, repaired=self._repaired)
        return found

    async def keep(self, addresses: Iterable[str]) -> None:
        """Closes all others."""
        unused = self._tritons.keys() - set(addresses)
        for triton in [self._tritons.pop(address) for address in unused]:
            await triton.close()

    async def close(self) -> None:
        await self.keep(())


class Pools:
    """`prepare`, then `watch` for as long as they are used, then `close`."""

    def __init__(
        self,
        config: Config,
        tiers: Iterable[Tier],
        clients: TritonClients,
        *,
        resolve: Resolver = resolve_dns,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
        ejected: Callable[[str, str], None] = lambda tier, code: None,
    ) -> None:
        self._clients = clients
        self._moved = asyncio.Event()
        self._dns_s = config.load_balancing.dns_refresh_s
        self._names: dict[str, EndpointDiscovery] = {}
        self._pools: dict[str, Pool] = {}
        for tier in tiers:
            self._names[tier.name] = EndpointDiscovery(tier.config.endpoint_addresses, resolve)
            self._pools[tier.name] = Pool(
                tier.name,
                tier.model,
                [place for place in tier.config.endpoint_addresses if not place.is_dns],
                clients.at,
                settings=config.load_balancing,
                load_balancing=tier.config.load_balancing,
                zone=config.server.zone,
                clock=clock,
                chance=chance,
                ejected=ejected,
            )

    @property
    def by_tier(self) -> Mapping[str, Pool]:
        return self._pools

    async def prepare(self) -> None:
        """Names are known before anybody asks; a resolver that is away delays that by a moment."""
        with anyio.move_on_after(_PREPARE_S):
            await self._follow()

    async def watch(self) -> None:
        async with anyio.create_task_group() as tasks:
            for pool in self._pools.values():
                tasks.start_soon(pool.watch)
            while True:
                with anyio.move_on_after(self._dns_s):
                    await self._moved.wait()
                self._moved.clear()
                await self._follow()
                await self._clients.keep(self._used())

    def move(self, tiers: Iterable[TierConfig]) -> None:
        """The endpoints of a configuration that was read again, from the next moment of `watch` on."""
        for tier in tiers:
            if tier.name in self._names:
                self._names[tier.name].move(tier.endpoint_addresses)
        self._moved.set()

    async def close(self) -> None:
        await self._clients.close()

    async def _follow(self) -> None:
        async with anyio.create_task_group() as tasks:
            for tier, names in self._names.items():
                tasks.start_soon(_follow, names, self._pools[tier])

    def _used(self) -> set[str]:
        return {one.address for pool in self._pools.values() for one in pool.endpoints}


async def _follow(names: EndpointDiscovery, pool: Pool) -> None:
    await names.refresh()
    # Names that are not known yet leave what there is.
    if zones := names.zones():
        pool.name(zones)
