"""What accepted reports have billed, on its way into the tenants' usage, which may be in another Redis.

A batch keeps its id until it is there, and the usage adds each id once: a worker that is killed on the way, and two
workers at the same time, count nothing twice.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

import anyio
from redis.exceptions import RedisError

from router.errors import JobStoreUnavailable

from ..accounts.tenants.usage import UsageBatch
from ..redis.faults import is_wrong_data, redis_fault
from .redis_client import RedisClient, as_fields

_INTERVAL_S = 1.0
_TIMEOUT_S = 5.0
_DAY_S = 86_400
AddUsage = Callable[[UsageBatch], Awaitable[None]]
"""Raises RedisError or OSError."""
_log = logging.getLogger("causeway.cloud.jobs")


class UsageOutbox:
    """Moves bills from the job store to the tenants' usage."""

    def __init__(self, database: RedisClient, add: AddUsage) -> None:
        self._database = database
        self._add = add
        self._fault = ""

    async def run(self) -> None:
        """Move what was billed, every second, until cancelled."""
        while True:
            await self.flush()
            await anyio.sleep(_INTERVAL_S)

    async def flush(self) -> bool:
        """Move what was billed. Returns False if a Redis does not answer: then it is kept."""
        try:
            while await self._move_batch():
                pass
        except (JobStoreUnavailable, RedisError, OSError, TimeoutError) as error:
            if not self._fault:
                if isinstance(error, JobStoreUnavailable):
                    reason = self._database.explain(error)
                else:
                    reason = redis_fault(error, "the tenants' address")
                _log.warning("usage of jobs is not written yet: %s", reason)
            self._fault = type(error).__name__
            return False
        self._fault = ""
        return True

    async def _move_batch(self) -> bool:
        """Returns False if nothing was billed."""
        fields = as_fields(await self._database.run("usage_take", secrets.token_hex(12)))
        if not fields:
            return False
        batch = fields.pop("id").decode()
        for each in _by_tenant(batch, fields):
            try:
                with anyio.fail_after(_TIMEOUT_S):
                    await self._add(each)
            except RedisError as error:
                if not is_wrong_data(error):
                    raise
                _log.error("usage of %s on %s is lost, its keys are damaged: %s", each.tenant, each.day, each.sums)
        await self._database.run("usage_done", batch)
        return True


def _by_tenant(batch: str, fields: dict[str, bytes]) -> list[UsageBatch]:
    sums: dict[tuple[str, str], dict[str, int]] = {}
    releases: dict[tuple[str, str], list[str]] = {}
    for name, value in fields.items():
        try:
            tenant, number, field = name.split("|", 2)
            day = datetime.fromtimestamp(int(number) * _DAY_S, UTC).strftime("%Y-%m-%d")
        except (ValueError, OverflowError, OSError):
            _log.error("a bill that cannot be read is lost: %s: %r", name, value)
            continue
        amounts, released = sums.setdefault((tenant, day), {}), releases.setdefault((tenant, day), [])
        kind, _, release = field.partition("|")
        if kind == "release":
            released.append(release)
        elif value.lstrip(b"-").isdigit():
            amounts[field] = int(value)
        else:
            _log.error("a bill that cannot be read is lost: %s: %r", name, value)
    return [
        UsageBatch(f"{batch}-{day}", tenant, day, amounts, tuple(releases[tenant, day]))
        for (tenant, day), amounts in sums.items()
    ]
