"""Usage: reservations of requests; tokens and cost per tenant, tier and route, in a Redis hash for each UTC day.

    requests|<tier>|<route>[|<variant>]  prompt|…  cached|…  completion|…  audio_ms|…  pico_usd|…
    and `pico_usd`, the day's sum, 1e-12 USD

A route is chat, completion, job or stream. Usage is written in batches off the request path; the same script gives back
what its requests had reserved of the budget. A batch keeps its id until Redis has confirmed it, so that a lost reply
does not count twice. While Redis is unavailable the sums accumulate here, up to a bound.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

import anyio
import msgspec
import redis.asyncio
from redis.exceptions import RedisError

from causeway_server.router.prices import PICO_USD
from causeway_server.router.types import Usage

from ...redis.connect import is_wrong_data
from ...redis.keys import load_script
from .config import TenantsConfig


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens and cost that a request may use. The next run of a job, told by its fence, takes over the reservation."""

    sequences: int = 1  # prompts × n
    tokens: int  # prompt and answer together
    pico_usd: int = 0  # at most
    lifetime_s: float = 60.0  # of the reservation, if the process is killed
    job: str = ""
    fence: int = 0


class Reservation(msgspec.Struct, frozen=True):
    """The tokens and the maximum cost reserved before a request."""

    tenant: str
    tokens: int
    pico_usd: int = 0
    id: str = ""  # of the reserved cost; "": nothing was reserved of a budget
    fence: int = 0
    sequences: int = 1  # taken from the rate of requests

    @property
    def release(self) -> str:
        """Argument that gives the reserved cost back; "" if there is none."""
        return f"{self.id}.{self.fence}" if self.id else ""


class Charge(msgspec.Struct, frozen=True):
    """Usage of a request, and its cost."""

    reservation: Reservation
    tier: str
    route: str  # chat, completion, job
    usage: Usage
    pico_usd: int
    variant: str = ""  # the tier's variant that answered

    @property
    def amounts(self) -> dict[str, int]:
        """Fields of the tenant's usage that this request adds to."""
        suffix = f"{self.tier}|{self.route}|{self.variant}" if self.variant else f"{self.tier}|{self.route}"
        rare = {f"cached|{suffix}": self.usage.cached_tokens, f"audio_ms|{suffix}": self.usage.audio_ms}
        return {
            f"requests|{suffix}": 1,
            f"prompt|{suffix}": self.usage.prompt_tokens,
            f"completion|{suffix}": self.usage.completion_tokens,
            **{field: amount for field, amount in rare.items() if amount},
            f"pico_usd|{suffix}": self.pico_usd,
            TOTAL: self.pico_usd,
        }


TOTAL = "pico_usd"
"""Field with a day's sum of all tiers and routes."""


SUBMISSIONS = "/submissions"
"""Suffix of a tenant's name in the name of its bucket for submissions of jobs, files and batches."""
READS = "/reads"
"""Suffix of a tenant's name in the name of its bucket for reads of these."""
API_KEY = "/key:"
"""Text between a tenant's name and an API key's id, in the name of that key's usage and budget."""
GATEWAYS_KEY = "causeway:tenants:gateways"
"""Key of the gateways that share the tenants' limits."""


_LUA: Final = f"{__package__}.lua"
ADD_USAGE_SCRIPT: Final = load_script(_LUA, "add", load_script(_LUA, "budget"))
_PICO_PER_MICRO: Final = 10**6  # of the previous version's field `micro_usd`, in days that are still kept
_MAX_PENDING_FIELDS = 20_000  # while Redis is unavailable
_FLUSH_TIMEOUT_S = 5.0
log = logging.getLogger(__name__)


def tenant_key(tenant: str, name: str) -> str:
    """Return a Redis key of a tenant, of its bucket of submissions or reads, or of an API key; they share a hash slot.
    The names:

    requests, tokens   token buckets
    usage:DAY          usage of a UTC day, as 2026-11-21
    budget             reservations of the tenant's budget, 1e-12 USD
    budget:ends        when they end
    batch:ID           mark of a batch of usage that Redis has added
    charge:ID          mark of a charge that Redis has made, as it may be asked for again
    """
    return f"causeway:tenant:{{{tenant}}}:{name}"


class UsageBatch(msgspec.Struct, frozen=True):
    """Sums of a tenant and day, and the reservations to give back. Redis adds each id once."""

    id: str
    tenant: str
    day: str
    sums: dict[str, int]
    releases: tuple[str, ...] = ()


class _OpenBatch(msgspec.Struct):
    sums: dict[str, int] = {}
    releases: list[str] = []


class UsageRow(msgspec.Struct, frozen=True):
    """Usage of a tenant on a day, by tier, route and variant of the tier ("": its own model)."""

    tier: str
    route: str
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    usd: float = 0.0
    cached_tokens: int = 0
    audio_ms: int = 0
    variant: str = ""


class UsageRecorder:
    """Recorder that sums usage and writes it to Redis. `lost` counts requests dropped because too many were pending.

    Args:
        client: Redis; None: nothing is recorded.
        wall_clock: Wall clock, Unix time in seconds.
    """

    def __init__(
        self, config: TenantsConfig, client: redis.asyncio.Redis | None, *, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._config = config
        self._add = client.register_script(ADD_USAGE_SCRIPT) if client is not None else None
        self._wall_clock = wall_clock
        self._open: dict[tuple[str, str], _OpenBatch] = {}  # by tenant and day
        self._pending: list[UsageBatch] = []
        self._fields = 0
        self.lost = 0

    def record(self, charge: Charge) -> None:
        """Add one request."""
        if self._add is None:
            return
        batch, amounts = self._batch(charge.reservation.tenant), charge.amounts
        new = sum(field not in batch.sums for field in amounts)
        if self._fields + new > _MAX_PENDING_FIELDS:
            self.lost += 1
            return
        self._fields += new
        for field, amount in amounts.items():
            batch.sums[field] = batch.sums.get(field, 0) + amount
        self.release(charge.reservation)

    def release(self, reservation: Reservation) -> None:
        """Give a reservation back with the next flush. Does nothing if it was not made."""
        if self._add is not None and reservation.release:
            self._batch(reservation.tenant).releases.append(reservation.release)

    async def flush(self) -> bool:
        """Write all sums to Redis. Returns False if some are still pending."""
        opened, self._open = self._open, {}
        self._pending += [
            UsageBatch(secrets.token_hex(12), tenant, day, batch.sums, tuple(batch.releases))
            for (tenant, day), batch in opened.items()
        ]
        try:
            while self._pending:
                batch = self._pending[0]
                try:
                    with anyio.fail_after(_FLUSH_TIMEOUT_S):
                        await self.add(batch)
                except RedisError as error:
                    if not is_wrong_data(error):
                        raise
                    self._set_aside(batch)
                self._pending.pop(0)
                self._fields -= len(batch.sums)
        except (RedisError, OSError, TimeoutError):
            return False
        return True

    def _set_aside(self, batch: UsageBatch) -> None:
        """Give up a batch whose tenant's keys are damaged, so that the others do not wait behind it."""
        requests = sum(amount for field, amount in batch.sums.items() if field.startswith("requests|"))
        log.error(
            "The usage of tenant %s on %s is lost, because its keys in Redis are damaged: %s",
            batch.tenant,
            batch.day,
            batch.sums,
        )
        self.lost += requests

    async def add(self, batch: UsageBatch) -> None:
        """Add a batch to the usage in Redis; a repeated call adds it once. Raises RedisError or OSError."""
        if self._add is None:
            return
        retention_s = self._config.usage_retention_days * 86400
        names = (f"usage:{batch.day}", f"batch:{batch.id}", "budget", "budget:ends")
        keys = [tenant_key(batch.tenant, name) for name in names]
        pairs = [value for pair in batch.sums.items() for value in pair]
        await self._add(keys, [retention_s, len(batch.releases), *batch.releases, *pairs])

    def _batch(self, tenant: str) -> _OpenBatch:
        day = datetime.fromtimestamp(self._wall_clock(), UTC).strftime("%Y-%m-%d")
        return self._open.setdefault((tenant, day), _OpenBatch())


async def read_usage(client: redis.asyncio.Redis, tenant: str, day: str) -> tuple[UsageRow, ...]:
    """Read the usage of a tenant on a UTC day, such as 2026-11-21. Raises RedisError."""
    sums: dict[tuple[str, str, str], dict[str, int]] = {}
    for name, amount in (await client.hgetall(tenant_key(tenant, f"usage:{day}"))).items():
        quantity, _, suffix = (name.decode() if isinstance(name, bytes) else name).partition("|")
        tier, _, rest = suffix.partition("|")
        route, _, variant = rest.partition("|")
        if suffix:
            sums.setdefault((tier, route, variant), {})[quantity] = int(amount)
    return tuple(
        UsageRow(
            tier,
            route,
            amounts.get("requests", 0),
            amounts.get("prompt", 0),
            amounts.get("completion", 0),
            (amounts.get("pico_usd", 0) + amounts.get("micro_usd", 0) * _PICO_PER_MICRO) / PICO_USD,
            amounts.get("cached", 0),
            amounts.get("audio_ms", 0),
            variant,
        )
        for (tier, route, variant), amounts in sorted(sums.items())
    )
