"""What the gateways of a tier tell each other, through Redis: that they are there, and how much they have to do.

    causeway:door:<tier>:<endpoints>   hash: gateway → "<when, Redis's clock, unix s> <its demand>"

Each takes what is less of what it saw now and a beat before: who may have more waits until the others have seen it too.
Who has been silent for ALIVE_S is not there any more. While Redis is away each keeps the part of the places that it
had, and one that has never reached it takes them all, as if it were alone: then its limit alone finds what is left.
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

from ..redis_scripts import load_script
from .controller import AdmissionController
from .peer_shares import divide_permits

EVERY_S = 0.5
ALIVE_S = 2.5
_WAIT_S = 1.0
_FORGET = 0.8  # a beat: a demand that was there a moment ago may be back in the next
_log = logging.getLogger("causeway.cloud.admission")


class SharedTier(msgspec.Struct, frozen=True):
    """A tier's door whose places are divided."""

    tier: str
    endpoints: tuple[str, ...]  # those who ask the same of them divide them
    places: int  # of all gateways together
    admission: AdmissionController

    @property
    def key(self) -> str:
        digest = hashlib.sha256("\n".join(sorted(self.endpoints)).encode()).hexdigest()
        return f"causeway:door:{self.tier}:{digest[:16]}"


class PeerHeartbeat:
    """Owns this gateway's name among its peers, and what each door last asked for."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        doors: Sequence[SharedTier],
        *,
        name: str = "",
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        self._redis = client
        self._doors = doors
        self._name = name or secrets.token_hex(8)
        self._sleep = sleep
        self._beat = client.register_script(load_script(__package__, "heartbeat"))
        self._demands = dict.fromkeys((door.key for door in doors), 0.0)
        self._parts = {door.key: door.places for door in doors}
        self.fault = ""

    async def watch(self) -> None:
        """Until cancelled; then the others may have this one's places at once."""
        try:
            while True:
                await self.beat()
                await self._sleep(EVERY_S)
        finally:
            with anyio.move_on_after(_WAIT_S, shield=True):
                await self._leave()

    async def beat(self) -> None:
        """Faults are kept in `fault`, never raised."""
        try:
            with anyio.fail_after(_WAIT_S):
                for door in self._doors:
                    before, part = (
                        self._parts[door.key],
                        divide_permits(door.places, await self._told(door))[self._name],
                    )
                    self._parts[door.key] = part
                    door.admission.bound(min(before, part))
        except (RedisError, OSError, TimeoutError, ValueError) as error:
            if not self.fault:
                _log.warning("gateways do not hear of each other: %s", error)
            self.fault = str(error) or type(error).__name__
            return
        self.fault = ""

    async def _told(self, door: SharedTier) -> Mapping[str, float]:
        demand = max(float(door.admission.demand), _FORGET * self._demands[door.key])
        self._demands[door.key] = demand
        told = await self._beat(keys=[door.key], args=[self._name, f"{demand:.2f}", ALIVE_S])
        found = [each.decode() if isinstance(each, bytes) else each for each in told]
        return {name: float(demand) for name, demand in zip(found[::2], found[1::2], strict=True)}

    async def _leave(self) -> None:
        try:
            for door in self._doors:
                await self._redis.hdel(door.key, self._name)
        except (RedisError, OSError):
            pass  # It will be missed in a moment.
