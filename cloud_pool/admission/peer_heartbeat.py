"""The permits of a tier divided between the gateways that share it, so that together they hand over what its Tritons
can take. Each gateway's demand goes through Redis:

    causeway:admission:<tier>:<endpoints>   hash: gateway → "<time, Redis's clock, unix s> <its demand>"

The division is pure (`divide_permits`): no gateway gets more than its demand while another gets less (max-min
fairness), and what no gateway demands is divided evenly. Each keeps at least half of an even part, for requests that
arrive between two heartbeats.

Each gateway uses the lower of its part now and its part one heartbeat before, so that a gateway that gains permits
waits until the others have seen it too. A gateway without a heartbeat for ALIVE_S counts as gone. While Redis is
unreachable each keeps its last part; a gateway that has never reached Redis takes all permits, as if it were alone, and
only its own concurrency limit finds what is left.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence

import anyio
import msgspec
import redis.asyncio
from redis.exceptions import RedisError

from ..redis.scripts import load_script
from .controller import AdmissionController

EVERY_S = 0.5
ALIVE_S = 2.5
_TIMEOUT_S = 1.0
_DEMAND_DECAY = 0.8  # per heartbeat: a demand of a moment ago may be back in the next
_log = logging.getLogger("causeway.cloud.admission")


class SharedTier(msgspec.Struct, frozen=True):
    """A tier whose permits are divided."""

    tier: str
    endpoints: tuple[str, ...]  # gateways with the same endpoints divide the permits
    permits: int  # of all gateways together
    admission: AdmissionController

    @property
    def key(self) -> str:
        digest = hashlib.sha256("\n".join(sorted(self.endpoints)).encode()).hexdigest()
        return f"causeway:admission:{self.tier}:{digest[:16]}"


class PeerHeartbeat:
    """Sends this gateway's demands and applies its parts. Owns its name among its peers."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        tiers: Sequence[SharedTier],
        *,
        name: str = "",
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        """Create the heartbeat; `name` is the gateway's, "" for a random one."""
        self._redis = client
        self._tiers = tiers
        self._name = name or secrets.token_hex(8)
        self._sleep = sleep
        self._script = client.register_script(load_script(__package__, "heartbeat"))
        self._demands = dict.fromkeys((tier.key for tier in tiers), 0.0)
        self._parts = {tier.key: tier.permits for tier in tiers}
        self.fault = ""

    async def watch(self) -> None:
        """Send heartbeats until cancelled, then release this gateway's parts to the others at once."""
        try:
            while True:
                await self.beat()
                await self._sleep(EVERY_S)
        finally:
            with anyio.move_on_after(_TIMEOUT_S, shield=True):
                await self._leave()

    async def beat(self) -> None:
        """Send one heartbeat for each tier. A fault is kept in `fault` and logged once, never raised."""
        try:
            with anyio.fail_after(_TIMEOUT_S):
                for tier in self._tiers:
                    part = divide_permits(tier.permits, await self._exchange(tier))[self._name]
                    before, self._parts[tier.key] = self._parts[tier.key], part
                    tier.admission.set_upper_bound(min(before, part))
        except (RedisError, OSError, TimeoutError, ValueError) as error:
            if not self.fault:
                _log.warning("the heartbeat between gateways fails, each keeps its permits: %s", error)
            self.fault = str(error) or type(error).__name__
            return
        self.fault = ""

    async def _exchange(self, tier: SharedTier) -> Mapping[str, float]:
        """Send this gateway's demand and return those of all live gateways, by name."""
        demand = max(float(tier.admission.demand), _DEMAND_DECAY * self._demands[tier.key])
        self._demands[tier.key] = demand
        reply = await self._script(keys=[tier.key], args=[self._name, f"{demand:.2f}", ALIVE_S])
        fields = [each.decode() if isinstance(each, bytes) else each for each in reply]
        return {name: float(demand) for name, demand in zip(fields[::2], fields[1::2], strict=True)}

    async def _leave(self) -> None:
        try:
            for tier in self._tiers:
                await self._redis.hdel(tier.key, self._name)
        except (RedisError, OSError):
            pass  # Its entry expires in a moment.


def divide_permits(permits: int, demands: Mapping[str, float]) -> dict[str, int]:
    """Return each gateway's part of the permits.

    Args:
        demands: By the gateway's name.

    Returns:
        Parts that add up to `permits`; 1 each where there are more gateways than permits.
    """
    if permits <= len(demands):
        return dict.fromkeys(demands, 1)
    least = max(1.0, permits / (2 * len(demands)))
    wanted = {name: max(least, demand) for name, demand in demands.items()}
    left, parts = float(permits), {}
    for at, name in enumerate(sorted(wanted, key=lambda one: (wanted[one], one))):
        parts[name] = min(wanted[name], left / (len(wanted) - at))
        left -= parts[name]
    return _rounded({name: part + left / len(parts) for name, part in parts.items()}, permits)


def _rounded(parts: Mapping[str, float], permits: int) -> dict[str, int]:
    """Round down and give the rest to the largest remainders, of equals by name: all gateways get the same result."""
    whole = {name: int(part) for name, part in parts.items()}
    order = sorted(parts, key=lambda name: (round(whole[name] - parts[name], 6), name))
    for name in order[: permits - sum(whole.values())]:
        whole[name] += 1
    return whole
