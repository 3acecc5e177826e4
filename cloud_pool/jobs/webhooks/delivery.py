"""Send webhooks: one POST per attempt, to an address that is checked when the socket is opened.

1. 2xx: delivered.
2. 410: the URL is disabled for `disable_after_410_s`.
3. Any other status, a redirect included, or no answer: retried, for about three days.
4. A forbidden address: as (3), since its DNS name may be corrected. No socket is opened.

An unexpected fault of one delivery is logged, and the delivery is retried as (3). While no deliveries can be claimed,
the log says so once.

A slot that is released claims the next delivery at once, so that a fast receiver waits for nothing.
"""

from __future__ import annotations

import logging
import random
import socket
import ssl
from collections.abc import Callable
from typing import Literal
from urllib.parse import urlsplit

import aiohttp
import anyio
from aiohttp.abc import AbstractResolver
from anyio.abc import TaskGroup

from router.errors import JobStoreUnavailable
from router.jobs.webhooks.address import Network, allowed_networks, forbidden_reason
from router.jobs.webhooks.payload import webhook_payload
from router.jobs.webhooks.schedule import webhook_retry_delay_s
from router.jobs.webhooks.signing import signed_headers
from router.serving.logs import redacted

from ...observability.tracing import JobTrace
from ..config import WebhookConfig
from ..metrics import JobMetrics
from .outbox import WebhookDelivery, WebhookOutbox

_IDLE_S = 0.5
_STATUS = "http.response.status_code"
DeliveryResult = Literal["delivered", "disabled", "retried"]
_log = logging.getLogger("causeway.cloud.webhooks")


class ForbiddenAddress(OSError):
    """No socket was opened, because webhooks may not be sent to this address."""


def guarded_socket_factory(allowed: tuple[Network, ...]) -> Callable[[aiohttp.AddrInfoType], socket.socket]:
    """Return a socket factory for aiohttp that raises ForbiddenAddress.

    aiohttp calls it for each address right before it connects: no name is resolved between check and connection.
    """

    def open_socket(info: aiohttp.AddrInfoType) -> socket.socket:
        family, kind, protocol, _, address = info
        reason = forbidden_reason(str(address[0]), allowed)
        if reason:
            raise ForbiddenAddress(f"the address {reason}")
        return socket.socket(family=family, type=kind, proto=protocol)

    return open_socket


class WebhookSender:
    """Sends due deliveries. Owns an HTTP client: call `close`.

    Args:
        resolver: replaces DNS in tests
        tls: trusted authorities; None: the system's
        clock: replaces the time of the claim in tests; unix time, s
        rng: uniform in [0, 1)
    """

    def __init__(
        self,
        outbox: WebhookOutbox,
        config: WebhookConfig,
        metrics: JobMetrics,
        *,
        resolver: AbstractResolver | None = None,
        trace: JobTrace | None = None,
        tls: ssl.SSLContext | None = None,
        clock: Callable[[], float] | None = None,
        rng: Callable[[], float] = random.random,
    ) -> None:
        """Raises ConfigError for an invalid `allowed_networks`."""
        self._allowed = allowed_networks(config.allowed_networks)
        self._outbox = outbox
        self._config = config
        self._metrics = metrics
        self._resolver = resolver
        self._trace = trace
        self._tls: ssl.SSLContext | bool = True if tls is None else tls
        self._clock = clock
        self._rng = rng
        self._in_flight = 0
        self._fault = ""
        self._slot_released = anyio.Event()
        self._client: aiohttp.ClientSession | None = None

    async def run(self) -> None:
        """Send deliveries until cancelled. A delivery that is cut off is sent again when its lease ends."""
        async with anyio.create_task_group() as tasks:
            while True:
                released = self._slot_released
                await self._begin_due(tasks)
                with anyio.move_on_after(_IDLE_S):
                    await released.wait()

    async def _begin_due(self, tasks: TaskGroup) -> None:
        fault = ""
        try:
            self._begin(await self._claim(), tasks)
        except JobStoreUnavailable as error:
            fault = error.message
        except Exception as error:
            fault = f"an unexpected fault: {redacted(error)}"
        if fault and fault != self._fault:
            _log.warning("no webhooks are sent: %s", fault)
        elif self._fault and not fault:
            _log.info("webhooks are sent again")
        self._fault = fault

    async def deliver_due(self) -> int:
        """Send the due deliveries that have a slot and wait for them. Returns how many. Raises JobStoreUnavailable."""
        due = await self._claim()
        async with anyio.create_task_group() as tasks:
            self._begin(due, tasks)
        return len(due)

    async def _claim(self) -> list[WebhookDelivery]:
        free = self._config.concurrency - self._in_flight
        if free <= 0:
            return []
        unreadable = self._outbox.unreadable
        due = await self._outbox.claim(free)
        for _ in range(self._outbox.unreadable - unreadable):
            self._metrics.count_delivery("failed")
        return due

    def _begin(self, due: list[WebhookDelivery], tasks: TaskGroup) -> None:
        for delivery in due:
            self._in_flight += 1
            tasks.start_soon(self._deliver, delivery)

    async def close(self) -> None:
        """Close the HTTP client."""
        if self._client is not None:
            await self._client.close()

    async def _deliver(self, delivery: WebhookDelivery) -> None:
        try:
            result = await self._send(delivery)
            delay_s = webhook_retry_delay_s(delivery.attempts + 1, self._rng()) if result == "retried" else 0.0
            outcome = "failed" if delay_s is None else result
            await self._outbox.finish(delivery, outcome, delay_s or 0.0)
        except JobStoreUnavailable as error:
            _log.warning("%s: the delivery will be repeated: %s", delivery.id, error.message)
            return
        finally:
            self._in_flight -= 1
            self._slot_released.set()
            self._slot_released = anyio.Event()
        self._metrics.count_delivery(outcome)

    async def _send(self, delivery: WebhookDelivery) -> DeliveryResult:
        secrets = await self._outbox.signing_secrets(delivery.owner)
        try:
            return await self._traced_post(delivery, secrets)
        except Exception as error:  # of one delivery, which the others survive
            _log.error("%s: not delivered, by an unexpected fault: %s", delivery.id, redacted(error))
            return "retried"

    async def _traced_post(self, delivery: WebhookDelivery, secrets: tuple[str, ...]) -> DeliveryResult:
        if self._trace is None:
            return (await self._post(delivery, secrets))[0]
        host = urlsplit(delivery.url).hostname or ""
        span = self._trace.deliver(delivery.job, host, delivery.traceparent, delivery.attempts)
        result, status = await self._post(delivery, secrets)
        error = "" if result == "delivered" else str(status or "undeliverable")
        span.end(error, {_STATUS: status} if status else None)
        return result

    async def _post(self, delivery: WebhookDelivery, secrets: tuple[str, ...]) -> tuple[DeliveryResult, int]:
        """Return the result and the receiver's status; 0 if there was none."""
        body, described = webhook_payload(delivery, self._config.format_of(delivery.owner))
        signed_at = delivery.claimed / 1000.0 if self._clock is None else self._clock()
        try:
            async with self._session().post(
                delivery.url,
                data=body.encode(),
                headers=described | signed_headers(delivery.message_id, body, secrets, signed_at),
                allow_redirects=False,
            ) as response:
                status = response.status  # the body is not read: the connection is closed instead
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            _log.info("%s: not delivered: %s", delivery.id, type(error).__name__)
            return "retried", 0  # (3), (4)
        if 200 <= status < 300:
            return "delivered", status  # (1)
        _log.info("%s: the receiver answered %d", delivery.id, status)
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
                trust_env=False,  # a proxy would open the connection, to an unchecked address
                auto_decompress=False,
                headers={"user-agent": "causeway-webhooks"},
            )
        return self._client
