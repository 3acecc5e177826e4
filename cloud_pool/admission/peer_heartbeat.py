"""A tier's permits, `concurrency` for each of its endpoints that takes requests, divided between the gateways and
workers that share it, so that together they hand over what its Tritons can take.

Twice a second the permits follow the endpoints: those that discovery added, and those that were
ejected or removed. Each process tells the others its demand through Redis:

    causeway:permits:<tier>:<endpoints>   hash: peer → "<time, Redis's clock, unix s> <its PeerState as JSON>"

`division` divides. Each uses the lower of its part now and its part one heartbeat before, so that a process that gains
permits waits until the others have seen it too; a worker waits one heartbeat more, since gateways reserve the part that
it announces. One without a heartbeat for ALIVE_S counts as gone. While Redis is unreachable gateways divide by the last
demands that they know, and each worker runs one job. Gateways without a Redis take all permits, as if each were alone,
and only their concurrency limits find what is left.
"""

from __future__ import annotations

import hashlib
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence

import anyio
import msgspec
import redis.asyncio
from redis.exceptions import RedisError

from ..dispatch.endpoint_selection import PoolCapacity
from ..redis.connect import client_fault
from ..redis.keys import load_script
from .controller import AdmissionController
from .division import JobShare, PeerKind, Peers, PeerState, gateway_permits, reserved_for_jobs, worker_permits
from .permits import TierCapacity

EVERY_S = 0.5
ALIVE_S = 2.5
_TIMEOUT_S = 1.0
_ALL = 1e6  # permits
_TURN_S = 16  # of a worker that gets a single permit: four of the times when one job may start
_DEMAND_DECAY = 0.8  # per heartbeat: a demand of a moment ago may be back in the next
log = logging.getLogger(__name__)
_peer_state = msgspec.json.Decoder(PeerState)


class SharedTier(msgspec.Struct, frozen=True):
    """A tier whose permits are divided."""

    tier: str
    concurrency: int  # permits of one endpoint
    endpoints: Callable[[], Sequence[str]]  # as configured: processes with the same ones share the tier
    capacity: Callable[[], PoolCapacity]
    admission: AdmissionController

    @property
    def key(self) -> str:
        digest = hashlib.sha256("\n".join(sorted(self.endpoints())).encode()).hexdigest()
        return f"causeway:permits:{self.tier}:{digest[:16]}"


class _TierShare:
    """State of a tier between two heartbeats."""

    def __init__(self, shared: SharedTier, kind: PeerKind) -> None:
        self.shared = shared
        self.key = ""  # of the last heartbeat
        self.peers: Peers = {}
        self.demand = 0.0
        # Gateways serve at once; a worker waits until the gateways have seen it.
        self.part = 0.0 if kind == "worker" else math.inf
        self.announced = 0.0  # a worker's part in its last heartbeat
        self.endpoints = math.inf
        self.turn = 0
        self.jobs = JobShare()


class PeerHeartbeat:
    """Heartbeat that announces this process's demands and applies its parts of the permits."""

    def __init__(
        self,
        client: redis.asyncio.Redis | None,
        tiers: Sequence[SharedTier],
        *,
        kind: PeerKind = "gateway",
        name: str = "",
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the heartbeat.

        Args:
            client: Redis; None: this process is alone.
            kind: Kind of this process; a worker's requests are jobs, which have the lowest class.
            name: Name of this process among its peers; "" for a random one.
        """
        self._redis = client
        self._tiers = [_TierShare(tier, kind) for tier in tiers]
        self._kind = kind
        self._name = name or secrets.token_hex(8)
        self._sleep = sleep
        self._clock = clock
        self._script = None if client is None else client.register_script(load_script(__package__, "heartbeat"))
        self.fault = ""

    async def watch(self) -> None:
        """Send heartbeats until cancelled, then release this process's parts to the others at once."""
        try:
            while True:
                await self.beat()
                await self._sleep(EVERY_S)
        finally:
            with anyio.move_on_after(_TIMEOUT_S, shield=True):
                await self._leave()

    async def beat(self) -> None:
        """Send one heartbeat for each tier. A fault is stored in `fault` and logged once, never raised."""
        for tier in self._tiers:
            self._measure(tier)
        try:
            with anyio.fail_after(_TIMEOUT_S):
                for tier in self._tiers:
                    await self._exchange(tier)
        except (RedisError, OSError, TimeoutError, msgspec.DecodeError, UnicodeDecodeError) as error:
            unreadable = isinstance(error, msgspec.DecodeError | UnicodeDecodeError)
            reason = str(error) if unreadable else client_fault(error, self._redis)
            if not self.fault:
                log.warning(
                    "The heartbeat between gateways and workers fails, so each process keeps the share of permits "
                    "that it has: %s",
                    reason,
                )
            self.fault = reason
        else:
            if self.fault:
                log.info("The heartbeat between gateways and workers works again.")
            self.fault = ""
        for tier in self._tiers:
            self._apply(tier)

    def _measure(self, tier: _TierShare) -> None:
        """Record this process's state: without Redis no other state is known for certain."""
        admission = tier.shared.admission
        running, part = admission.demand, 0
        if self._kind == "gateway":
            tier.demand = max(float(running), _DEMAND_DECAY * tier.demand)
        else:
            tier.demand = _ALL if admission.wants_more else float(running)
            # Messages wait in admission, and hold no permit: other workers may have what this one leaves.
            running, part = running - admission.scheduler.waiting, int(tier.part)
        lacks_capacity = admission.scheduler.lacks_capacity(self._clock())
        own_state = PeerState(self._kind, round(tier.demand, 2), running, lacks_capacity, part)
        tier.peers = {**tier.peers, self._name: own_state}

    async def _exchange(self, tier: _TierShare) -> None:
        """Announce this process's state and read those of all live peers."""
        if self._script is None or self._redis is None:
            return
        key = tier.shared.key
        if tier.key not in ("", key):
            await self._redis.hdel(tier.key, self._name)  # The configuration was reloaded.
        tier.key = key
        reply = await self._script(keys=[key], args=[self._name, msgspec.json.encode(tier.peers[self._name]), ALIVE_S])
        tier.turn = reply[0] // _TURN_S
        fields = [each.encode() if isinstance(each, str) else each for each in reply[1:]]
        tier.peers = {
            name.decode(): _peer_state.decode(state) for name, state in zip(fields[::2], fields[1::2], strict=True)
        }

    def _apply(self, tier: _TierShare) -> None:
        capacity = tier.shared.capacity()
        permits = max(1, round(tier.shared.concurrency * capacity.endpoints))
        part, jobs = self._part(tier, permits, capacity.endpoints)
        known = tier.part if self._kind == "gateway" else min(tier.announced, tier.part)
        bound, endpoints = int(min(known, part)), min(tier.endpoints, capacity.endpoints)
        tier.announced, tier.part, tier.endpoints = tier.part, part, capacity.endpoints
        tier.shared.admission.set_upper_bound(bound, TierCapacity(permits, endpoints, jobs, capacity.away))

    def _part(self, tier: _TierShare, permits: int, endpoints: float) -> tuple[int, int]:
        """Return this process's part of the tier's permits, and how many of them jobs hold."""
        if self._kind == "gateway":
            parts = gateway_permits(permits, tier.peers)
            return parts.get(self._name, permits), reserved_for_jobs(parts, tier.peers).get(self._name, 0)
        jobs = tier.jobs.permits(permits, tier.peers, self._clock(), endpoints)
        return (1 if self.fault else worker_permits(jobs, tier.peers, tier.turn).get(self._name, 0)), 0

    async def _leave(self) -> None:
        try:
            for tier in self._tiers:
                if tier.key and self._redis is not None:
                    await self._redis.hdel(tier.key, self._name)
        except (RedisError, OSError):
            pass  # Its entry expires in a moment.
