"""Tokens and cost per tenant, tier and route, in one Redis hash a tenant and UTC day.

    requests|<tier>|<route>  prompt|…  completion|…  micro_usd|…      and `micro_usd`, the day's sum

A route is what the work came as: chat, completion, job. Written in batches off the request's path; a batch keeps its
name until Redis has confirmed it, so a lost reply counts nothing twice. While Redis is away sums grow here, bounded.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime

import anyio
import msgspec
import redis.asyncio
from redis.exceptions import RedisError

from router.types import Usage

from .config import MICRO_USD_PER_USD, TenantsConfig
from .scripts import ADD_USAGE_SCRIPT, batch_key, usage_key

_MAX_PENDING_FIELDS = 20_000  # kept while Redis is away; beyond, `lost` counts
_FLUSH_TIMEOUT_S = 5.0
TOTAL = "micro_usd"


class _PendingUsage(msgspec.Struct, frozen=True):
    id: str
    tenant: str
    day: str
    sums: dict[str, int]


class UsageRow(msgspec.Struct, frozen=True):
    """What a tenant used on a day, of a tier, by a route."""

    tier: str
    route: str
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    usd: float = 0.0


class UsageRecorder:
    """Owns the sums that Redis has not heard of yet. `lost` counts requests that found no room here."""

    def __init__(
        self,
        config: TenantsConfig,
        client: redis.asyncio.Redis | None,
        *,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._add = client.register_script(ADD_USAGE_SCRIPT) if client is not None else None
        self._wall_clock = wall_clock
        self._sums: dict[tuple[str, str], dict[str, int]] = {}
        self._sending: list[_PendingUsage] = []
        self._fields = 0
        self.lost = 0

    def record(self, tenant: str, tier: str, route: str, usage: Usage, micro_usd: int) -> None:
        """One request's use."""
        if self._add is None:
            return
        day = datetime.fromtimestamp(self._wall_clock(), UTC).strftime("%Y-%m-%d")
        sums = self._sums.setdefault((tenant, day), {})
        at = f"{tier}|{route}"
        amounts = {
            f"requests|{at}": 1,
            f"prompt|{at}": usage.prompt_tokens,
            f"completion|{at}": usage.completion_tokens,
            f"micro_usd|{at}": micro_usd,
            TOTAL: micro_usd,
        }
        new = sum(field not in sums for field in amounts)
        if self._fields + new > _MAX_PENDING_FIELDS:
            self.lost += 1
            return
        self._fields += new
        for field, amount in amounts.items():
            sums[field] = sums.get(field, 0) + amount

    async def flush(self) -> bool:
        """Whether Redis has all of it now."""
        if self._add is None:
            return True
        self._sending += [
            _PendingUsage(secrets.token_hex(12), tenant, day, sums)
            for (tenant, day), sums in self._sums.items()
            if sums
        ]
        self._sums = {}
        keep_s = self._config.usage_retention_days * 86400
        try:
            while self._sending:
                batch = self._sending[0]
                pairs = [value for pair in batch.sums.items() for value in pair]
                keys = [usage_key(batch.tenant, batch.day), batch_key(batch.tenant, batch.id)]
                with anyio.fail_after(_FLUSH_TIMEOUT_S):
                    await self._add(keys, [keep_s, *pairs])
                self._sending.pop(0)
                self._fields -= len(batch.sums)
        except (RedisError, OSError, TimeoutError):
            return False
        return True


async def read_usage(client: redis.asyncio.Redis, tenant: str, day: str) -> tuple[UsageRow, ...]:
    """`day` is UTC, 2026-11-21. Raises RedisError."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    for name, amount in (await client.hgetall(usage_key(tenant, day))).items():
        what, _, at = (name.decode() if isinstance(name, bytes) else name).partition("|")
        tier, _, route = at.partition("|")
        if at:
            found.setdefault((tier, route), {})[what] = int(amount)
    return tuple(
        UsageRow(
            tier,
            route,
            sums.get("requests", 0),
            sums.get("prompt", 0),
            sums.get("completion", 0),
            sums.get("micro_usd", 0) / MICRO_USD_PER_USD,
        )
        for (tier, route), sums in sorted(found.items())
    )
