"""Webhooks: what is due, to whom, signed how. The delivery itself is in `delivery`."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime
from urllib.parse import urlsplit

import msgspec
from standardwebhooks import Webhook

from ..config import WebhookConfig
from ..errors import WebhookRefused
from ..store.redis_client import RedisClient, items, number, pairs, text
from .address import Network, forbidden_reason

MAX_URL = 2048
_OVERLAP_MS = 24 * 3600 * 1000  # a secret that was rotated still signs for a day
_LEASE_MARGIN_S = 15.0


class WebhookDelivery(msgspec.Struct, frozen=True, kw_only=True):
    """A delivery that is due. It carries no content: the receiver asks for the job."""

    id: str  # the same in each try: the receiver's idempotency key
    job: str
    owner: str
    url: str
    state: str
    finished: int  # unix ms
    attempts: int
    fence: int
    traceparent: str = ""


class _PayloadJob(msgspec.Struct):
    id: str
    status: str
    object: str = "job"


class _Payload(msgspec.Struct):
    type: str
    timestamp: str
    data: _PayloadJob


def webhook_payload(delivery: WebhookDelivery) -> str:
    at = datetime.fromtimestamp(delivery.finished / 1000.0, tz=UTC).isoformat().replace("+00:00", "Z")
    return msgspec.json.encode(
        _Payload(f"job.{delivery.state}", at, _PayloadJob(delivery.job, delivery.state))
    ).decode()


def signed_headers(delivery: WebhookDelivery, body: str, keys: tuple[str, ...], now_s: float) -> dict[str, str]:
    """The headers of the Standard Webhooks specification; one signature for each key that is valid."""
    at = datetime.fromtimestamp(int(now_s), tz=UTC)
    return {
        "content-type": "application/json",
        "webhook-id": f"msg_{delivery.id}",
        "webhook-timestamp": str(int(now_s)),
        "webhook-signature": " ".join(Webhook(key).sign(f"msg_{delivery.id}", at, body) for key in keys),
    }


def check_webhook_url(url: str, *, allow_http: bool, allowed: tuple[Network, ...]) -> str:
    """What can be told without asking DNS; the rest is told at connect time. Raises WebhookRefused."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise WebhookRefused("`webhook` is no URL", param="webhook") from None
    if len(url) > MAX_URL or not host or not url.isascii() or not url.isprintable() or " " in url or port == 0:
        raise WebhookRefused(f"`webhook` is a URL of at most {MAX_URL} ASCII characters", param="webhook")
    if parts.scheme != "https" and not (allow_http and parts.scheme == "http"):
        raise WebhookRefused("`webhook` must begin with https://", param="webhook")
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise WebhookRefused("`webhook` may hold no user, password or fragment", param="webhook")
    why = forbidden_reason(host, allowed)
    if why and why != "is no address":
        raise WebhookRefused(f"`webhook` may not go there: {host} {why}", param="webhook")
    return url


class WebhookOutbox:
    """Deliveries in Redis. Raises StoreUnavailable."""

    def __init__(self, database: RedisClient, config: WebhookConfig, *, clock: Callable[[], float] = time.time) -> None:
        self._db = database
        self._config = config
        self._clock = clock

    @property
    def _now_ms(self) -> int:
        return int(self._clock() * 1000)

    async def claim(self, limit: int) -> list[WebhookDelivery]:
        """Due deliveries, ours until the lease ends: then another worker makes them."""
        lease = int((self._config.timeout_s + _LEASE_MARGIN_S) * 1000)
        found = []
        for row in items(await self._db.run("webhook_claim", self._now_ms, lease, limit)):
            plain = {name: value.decode() for name, value in pairs(row).items()}
            found.append(msgspec.convert(plain, WebhookDelivery, strict=False))
        return found

    async def end(self, delivery: WebhookDelivery, outcome: str, pause_s: float = 0.0) -> bool:
        """`outcome`: delivered, failed, disabled, or retried after `pause_s`. False: it was another's by now."""
        due = self._now_ms + int(pause_s * 1000)
        gone_ms = int(self._config.disable_after_410_s * 1000)
        return number(await self._db.run("webhook_finish", delivery.id, delivery.fence, outcome, due, gone_ms)) > 0

    async def keys(self, owner: str, *, rotate: bool = False) -> tuple[str, ...]:
        """The owner's secrets, newest first; made when first asked for."""
        candidate = "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()
        reply = await self._db.run("webhook_secrets", owner, self._now_ms, candidate, int(rotate), _OVERLAP_MS)
        return tuple(text(key) for key in items(reply))

    async def is_disabled(self, owner: str, url: str) -> bool:
        return number(await self._db.run("webhook_disabled", owner, url)) > 0
