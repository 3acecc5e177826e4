"""The outboxes in Redis, which accepted reports fill: webhooks to deliver, and bills to add to the tenants' usage."""

from __future__ import annotations

import base64
import logging
import secrets
from collections.abc import Awaitable, Callable, Collection
from datetime import UTC, datetime
from typing import Final

import anyio
import msgspec
from redis.exceptions import RedisError

from causeway_server.router.errors import JobStoreUnavailable
from causeway_server.router.serving.webhooks import DeliveryOutcome, DueWebhook, WebhookQueue

from ..accounts.tenants.usage import UsageBatch
from ..redis.connect import is_wrong_data, redis_fault
from .config import WebhookConfig
from .redis_client import RedisClient, as_fields, as_int, as_list, as_text

_OVERLAP_MS = 24 * 3600 * 1000  # a rotated secret stays valid for a day
_LEASE_MARGIN_S = 15.0
_MAX_AGE_MS = 4 * 24 * 3600 * 1000  # also of a delivery that waits for an open breaker
BREAKER_FAILURES: Final = 5  # in a row
BREAKER_PAUSE_S: Final = 60.0
log = logging.getLogger(__name__)
_INTERVAL_S = 1.0
_TIMEOUT_S = 5.0
_DAY_S = 86_400
AddUsage = Callable[[UsageBatch], Awaitable[None]]
"""Adds usage to a tenant. Raises RedisError or OSError."""


class WebhookDelivery(DueWebhook, frozen=True, kw_only=True):
    """A delivery that is due."""

    fence: int  # `claimed` is a time of Redis's clock
    traceparent: str = ""


class WebhookOutbox(WebhookQueue[WebhookDelivery]):
    """Pending deliveries and the owners' signing secrets. Every method raises JobStoreUnavailable without Redis.

    Deliveries wait by tenant and receiver (scheme, host and port), so that a slow or unavailable receiver does not
    delay others. Tenants take turns, then their receivers, and both have a bounded number of deliveries in all workers.
    A tenant's failures open only its own breaker: other tenants at the same host have separate slots and breakers.

    `on_unreadable` is called for each delivery that failed here because its record is lost or damaged.
    """

    counts_unreachable = True

    def __init__(self, database: RedisClient, config: WebhookConfig) -> None:
        self._db = database
        self._config = config
        self.on_unreadable: Callable[[], None] = lambda: None

    async def claim(self, limit: int, in_flight: Collection[WebhookDelivery] = ()) -> list[WebhookDelivery]:
        """Lease up to `limit` due deliveries. When the lease ends before `finish`, another worker sends them."""
        config = self._config
        lease_ms = int((config.timeout_s + _LEASE_MARGIN_S) * 1000)
        slots = (config.concurrency_per_receiver, config.concurrency_per_tenant)
        deliveries = []
        reply = as_list(await self._db.run("webhook_claim", self._db.time, lease_ms, limit, *slots, _MAX_AGE_MS))
        rows, dropped, aside = (as_list(part) for part in reply)
        for name in map(as_text, dropped):
            log.error("The webhook delivery %s has failed, because its record is lost.", name)
            self.on_unreadable()
        for tenant, error in zip(map(as_text, aside[::2]), map(as_text, aside[1::2]), strict=True):
            code = error.split(" ")[0]  # the rest may quote data of the tenant
            log.error(
                "Webhooks of tenant %s wait for a minute, because the stored webhooks are damaged: %s", tenant, code
            )
        for row in rows:
            plain = {name: value.decode("utf-8", "replace") for name, value in as_fields(row).items()}
            try:
                deliveries.append(msgspec.convert(plain, WebhookDelivery, strict=False))
            except msgspec.ValidationError as error:
                problem = "The webhook delivery %s has failed, because its record is damaged or of another version: %s"
                log.error(problem, plain["id"], error)
                await self._db.run("webhook_finish", self._db.time, plain["id"], plain["fence"], "failed", 0, 0, 0, 0)
                self.on_unreadable()
        if deliveries:
            # A failover must not lose the end of a job that a receiver knows about: the job would end twice.
            await self._db.replicate()
        return deliveries

    async def finish(self, delivery: WebhookDelivery, outcome: DeliveryOutcome, delay_s: float = 0.0) -> bool:
        """Record an outcome (`delay_s`: of a retry). Return False if another worker has claimed the delivery."""
        disabled_ms = int(self._config.disable_after_410_s * 1000)
        arguments = (self._db.time, delivery.id, delivery.fence, outcome, int(delay_s * 1000), disabled_ms)
        breaker = (BREAKER_FAILURES, int(BREAKER_PAUSE_S * 1000))
        return as_int(await self._db.run("webhook_finish", *arguments, *breaker)) > 0

    async def signing_secrets(self, owner: str, *, rotate: bool = False) -> tuple[str, ...]:
        """Return the owner's valid secrets, newest first. The first call creates one; `rotate` replaces it."""
        candidate = "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()
        reply = await self._db.run("webhook_secrets", owner, self._db.time, candidate, int(rotate), _OVERLAP_MS)
        return tuple(as_text(secret) for secret in as_list(reply))

    async def is_disabled(self, owner: str, url: str) -> bool:
        """Return whether the URL has recently answered 410 Gone to this owner."""
        return as_int(await self._db.run("webhook_disabled", owner, url)) > 0


class UsageOutbox:
    """Moves bills from the job store to the tenants' usage, which may be in another Redis.

    A batch keeps its id, which the usage adds once: neither killed nor concurrent workers count a bill twice.
    """

    def __init__(self, database: RedisClient, add: AddUsage) -> None:
        self._database = database
        self._add = add
        self._fault = ""

    async def run(self) -> None:
        """Move the bills, every second, until cancelled."""
        while True:
            await self.flush()
            await anyio.sleep(_INTERVAL_S)

    async def flush(self) -> bool:
        """Move the bills. Return False if a Redis does not answer; the bills are then kept."""
        try:
            while await self._move_batch():
                pass
        except (JobStoreUnavailable, RedisError, OSError, TimeoutError) as error:
            if not self._fault:
                if isinstance(error, JobStoreUnavailable):
                    reason = self._database.explain(error)
                else:
                    reason = redis_fault(error, "the tenants' address")
                log.warning("The usage of jobs could not be written yet: %s", reason)
            self._fault = type(error).__name__
            return False
        self._fault = ""
        return True

    async def _move_batch(self) -> bool:
        """Move one batch of bills. Returns False if there are none."""
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
                log.error(
                    "The usage of tenant %s on %s is lost, because its keys in Redis are damaged: %s",
                    each.tenant,
                    each.day,
                    each.sums,
                )
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
            log.error("The cost of a job cannot be read and is lost: field %s has the value %r.", name, value)
            continue
        amounts, released = sums.setdefault((tenant, day), {}), releases.setdefault((tenant, day), [])
        kind, _, release = field.partition("|")
        if kind == "release":
            released.append(release)
        elif value.lstrip(b"-").isdigit():
            amounts[field] = int(value)
        else:
            log.error("The cost of a job cannot be read and is lost: field %s has the value %r.", name, value)
    return [
        UsageBatch(f"{batch}-{day}", tenant, day, amounts, tuple(releases[tenant, day]))
        for (tenant, day), amounts in sums.items()
    ]
