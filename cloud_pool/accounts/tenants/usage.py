"""Tokens and cost per tenant, tier and route, in one Redis hash per tenant and UTC day.

    requests|<tier>|<route>  prompt|...  completion|...  micro_usd|...     and `micro_usd`, the day's sum

A route is chat, completion or job. Usage is written in batches off the request path. A batch keeps its id until Redis
has confirmed it, so that a lost reply counts nothing twice. While Redis is unavailable sums grow here, bounded.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

import anyio
import msgspec
import redis.asyncio
from redis.exceptions import RedisError

from router.types import Usage

from ...redis.scripts import load_script
from .config import MICRO_USD_PER_USD, TenantsConfig
from .redis_keys import batch_key, usage_key

ADD_USAGE_SCRIPT: Final = load_script(f"{__package__}.lua", "add")
_MAX_PENDING_FIELDS = 20_000  # while Redis is unavailable
_FLUSH_TIMEOUT_S = 5.0
TOTAL = "micro_usd"


class _PendingUsage(msgspec.Struct, frozen=True):
    """One batch: sums of a tenant and day that Redis has not confirmed."""

    id: str
    tenant: str
    day: str
    sums: dict[str, int]


class UsageRow(msgspec.Struct, frozen=True):
    """Usage of a tenant on a day, by tier and route."""

    tier: str
    route: str
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    usd: float = 0.0


class UsageRecorder:
    """Sums usage and writes it to Redis. `lost` counts requests that were not recorded because too much was pending.

    Args:
        client: None to record nothing
        wall_clock: unix time, s
    """

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
        self._pending: list[_PendingUsage] = []
        self._fields = 0
        self.lost = 0

    def record(self, tenant: str, tier: str, route: str, usage: Usage, micro_usd: int) -> None:
        """Add one request."""
        if self._add is None:
            return
        day = datetime.fromtimestamp(self._wall_clock(), UTC).strftime("%Y-%m-%d")
        sums = self._sums.setdefault((tenant, day), {})
        suffix = f"{tier}|{route}"
        amounts = {
            f"requests|{suffix}": 1,
            f"prompt|{suffix}": usage.prompt_tokens,
            f"completion|{suffix}": usage.completion_tokens,
            f"micro_usd|{suffix}": micro_usd,
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
        """Write all sums to Redis. Returns False if some are still pending."""
        if self._add is None:
            return True
        self._pending += [
            _PendingUsage(secrets.token_hex(12), tenant, day, sums)
            for (tenant, day), sums in self._sums.items()
            if sums
        ]
        self._sums = {}
        retention_s = self._config.usage_retention_days * 86400
        try:
            while self._pending:
                batch = self._pending[0]
                pairs = [value for pair in batch.sums.items() for value in pair]
                keys = [usage_key(batch.tenant, batch.day), batch_key(batch.tenant, batch.id)]
                with anyio.fail_after(_FLUSH_TIMEOUT_S):
                    await self._add(keys, [retention_s, *pairs])
                self._pending.pop(0)
                self._fields -= len(batch.sums)
        except (RedisError, OSError, TimeoutError):
            return False
        return True


async def read_usage(client: redis.asyncio.Redis, tenant: str, day: str) -> tuple[UsageRow, ...]:
    """Read the usage of a tenant on a UTC day, as 2026-11-21. Raises RedisError."""
    sums: dict[tuple[str, str], dict[str, int]] = {}
    for name, amount in (await client.hgetall(usage_key(tenant, day))).items():
        quantity, _, suffix = (name.decode() if isinstance(name, bytes) else name).partition("|")
        tier, _, route = suffix.partition("|")
        if suffix:
            sums.setdefault((tier, route), {})[quantity] = int(amount)
    return tuple(
        UsageRow(
            tier,
            route,
            amounts.get("requests", 0),
            amounts.get("prompt", 0),
            amounts.get("completion", 0),
            amounts.get("micro_usd", 0) / MICRO_USD_PER_USD,
        )
        for (tier, route), amounts in sorted(sums.items())
    )
