"""Scripted endpoints, and a clock that tests set."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import anyio

from causeway_server.cloud_pool.dispatch.config import LoadBalancing, LoadBalancingConfig
from causeway_server.cloud_pool.dispatch.discovery import TierEndpoints, parse_endpoint_address
from causeway_server.cloud_pool.dispatch.pool import Pool
from causeway_server.cloud_pool.upstreams.triton.client import TritonClient
from causeway_server.router.errors import CausewayError, DeadlineExceeded


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Endpoint:
    """A scripted Triton client."""

    def __init__(self) -> None:
        self.fault: CausewayError | None = None
        self.hangs = False
        self.last_received = -math.inf
        self.probes = 0
        self.ended: list[tuple[CausewayError, bool]] = []
        self.closed = False
        self.renewed = 0
        self.probe_timeout_s = 0.0  # of the last probe

    async def probe(self, model: str, timeout_s: float = 3.0, *, embed: bool = False) -> None:
        self.probes += 1
        self.probe_timeout_s = timeout_s
        if self.hangs:
            await anyio.sleep(timeout_s)
            raise DeadlineExceeded("no answer")
        await anyio.lowlevel.checkpoint()
        if self.fault is not None:
            raise self.fault

    def last_received_at(self, model: str) -> float:
        return self.last_received

    def fail_calls(self, model: str, error: CausewayError, *, begun: bool = True) -> None:
        self.ended.append((error, begun))

    def renew(self) -> None:
        self.renewed += 1

    async def close(self) -> None:
        self.closed = True


class Bed:
    """A pool over scripted endpoints; by default its `rng` always draws the first two, in order."""

    def __init__(
        self,
        *endpoints: str,
        settings: LoadBalancingConfig | None = None,
        zone: str = "",
        load_balancing: LoadBalancing = "least_loaded",
        rng: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.clock = Clock()
        self.tritons: dict[str, Endpoint] = {}
        self.ejections: list[tuple[str, str]] = []
        self.pool = Pool(
            TierEndpoints(
                "large", "m", tuple(parse_endpoint_address(text) for text in endpoints), load_balancing=load_balancing
            ),
            lambda address: cast("TritonClient", self.at(address)),
            settings=settings or LoadBalancingConfig(),
            zone=zone,
            clock=self.clock,
            rng=rng,
            ejected=lambda *what: self.ejections.append(what),
        )

    def at(self, address: str) -> Endpoint:
        return self.tritons.setdefault(address, Endpoint())

    def phases(self) -> dict[str, str]:
        return {one.address: one.phase for one in self.pool.endpoints}
