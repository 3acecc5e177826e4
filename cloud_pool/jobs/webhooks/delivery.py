"""Webhooks go out: one POST each, to an address that is checked when it is connected to.

1. 2xx                                  delivered
2. 410                                  the address gets nothing more for a while (`disable_after_410_s`)
3. anything else, a redirect included   again, later, for hours
4. a forbidden address                  like (3): no socket is opened, and its name may be mended
"""

from __future__ import annotations

import logging
import random
import socket
import ssl
import time
from collections.abc import Callable
from typing import Literal
from urllib.parse import urlsplit

import aiohttp
import anyio
from aiohttp.abc import AbstractResolver

from ...observability.tracing import JobTrace
from ..backoff import webhook_retry_delay_s
from ..config import WebhookConfig
from ..errors import JobStoreUnavailable
from ..metrics import JobMetrics
from .address import Network, forbidden_reason, parse_networks
from .outbox import WebhookDelivery, WebhookOutbox, signed_headers, webhook_payload

_log = logging.getLogger("causeway.cloud.webhooks")
_IDLE_S = 0.5
_STATUS = "http.response.status_code"
DeliveryResult = Literal["delivered", "disabled", "retried"]


class ForbiddenAddress(OSError):
    """No socket was opened."""


def guarded_socket_factory(allowed: tuple[Network, ...]) -> Callable[[aiohttp.AddrInfoType], socket.socket]:
    """Sockets for aiohttp. It asks for one for each address right before it connects: no name is resolved after."""

    def open_socket(info: aiohttp.AddrInfoType) -> socket.socket:
        family, kind, protocol, _, address = info
        why = forbidden_reason(str(address[0]), allowed)
        if why:
            raise ForbiddenAddress(f"the address {why}")
        return socket.socket(family=family, type=kind, proto=protocol)

    return open_socket


class WebhookSender:
    """Owns the HTTP client. `close` it."""

    def __init__(
        self,
        hooks: WebhookOutbox,
        config: WebhookConfig,
        metrics: JobMetrics,
        *,
        resolver: AbstractResolver | None = None,
        trace: JobTrace | None = None,
        tls: ssl.SSLContext | None = None,
        clock: Callable[[], float] = time.time,
        rng: Callable[[], float] = random.random,
    ) -> None:
        """`tls`: whom to trust; None: the system's authorities. Raises ConfigError for an allow-list that is none."""
        self._allowed = parse_networks(config.allowed_networks, "jobs.webhooks.allowed_networks")
        self._hooks = hooks
        self._config = config
        self._metrics = metrics
        self._resolver = resolver
        self._trace = trace
        self._tls: ssl.SSLContext | bool = True if tls is None else tls
        self._clock = clock
        self._rng = rng
        self._client: aiohttp.ClientSession | None = None

    async def run(self) -> None:
        """Until cancelled: what is then under way is made again when its lease ends."""
        while True:
            try:
                made = await self.deliver_due()
            except JobStoreUnavailable:
                made = 0
            if not made:
                await anyio.sleep(_IDLE_S)

    async def deliver_due(self) -> int:
        """Makes the deliveries that are due, some at once. Raises StoreUnavailable."""
        due = await self._hooks.claim(self._config.concurrency)
        async with anyio.create_task_group() as tasks:
            for delivery in due:
                tasks.start_soon(self._deliver, delivery)
        return len(due)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def _deliver(self, delivery: WebhookDelivery) -> None:
        try:
            keys = await self._hooks.keys(delivery.owner)
            said = await self._post(delivery, keys)
            pause_s = webhook_retry_delay_s(delivery.attempts + 1, self._rng()) if said == "retried" else 0.0
            outcome = "failed" if pause_s is None else said
            await self._hooks.end(delivery, outcome, pause_s or 0.0)
        except JobStoreUnavailable as error:
            _log.warning("%s: the delivery will be made again: %s", delivery.id, error.message)
            return
        self._metrics.count_delivery(outcome)

    async def _post(self, delivery: WebhookDelivery, keys: tuple[str, ...]) -> DeliveryResult:
        body, host = webhook_payload(delivery), urlsplit(delivery.url).hostname or ""
        step = (
            None
            if self._trace is None
            else self._trace.deliver(delivery.job, host, delivery.traceparent, delivery.attempts)
        )
        said, status = await self._send(delivery, body, keys)
        if step is not None:
            step.end(
                "" if said == "delivered" else str(status or "undeliverable"), {_STATUS: status} if status else None
            )
        return said

    async def _send(self, delivery: WebhookDelivery, body: str, keys: tuple[str, ...]) -> tuple[DeliveryResult, int]:
        """With the receiver's status; 0 where there was none."""
        try:
            async with self._session().post(
                delivery.url,
                data=body.encode(),
                headers=signed_headers(delivery, body, keys, self._clock()),
                allow_redirects=False,
            ) as response:
                status = response.status  # its body is not read: the connection is closed instead
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            _log.info("%s: not delivered: %s", delivery.id, type(error).__name__)
            return "retried", 0  # (3), (4)
        if 200 <= status < 300:
            return "delivered", status  # (1)
        _log.info("%s: the receiver said %d", delivery.id, status)
        return ("disabled" if status == 410 else "retried"), status  # (2), (3)

    def _session(self) -> aiohttp.ClientSession:
        if self._client is None:
            connector = aiohttp.TCPConnector(
                resolver=self._resolver,
                use_dns_cache=False,
                force_close=True,
                limit=self._config.concurrency,
                socket_factory=guarded_socket_factory(self._allowed),
                ssl=self._tls,
            )
            self._client = aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=self._config.timeout_s),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,  # a proxy would connect in our stead, unchecked
                auto_decompress=False,
                headers={"user-agent": "causeway-webhooks"},
            )
        return self._client
