"""Sending of webhooks: one POST per attempt, to an address that is checked when the socket is opened.

1. 2xx: delivered.
2. 410: disabled.
3. Any other status, a redirect included, or no answer in time: retried, for about three days.
4. No connection: the queue decides whether that counts as an attempt. A forbidden address counts as no connection,
   since its DNS name may be corrected; no socket is opened.
5. An interrupted webhook is sent again: a receiver may get it twice, with the same id.

An unexpected fault of a webhook is logged, and the webhook is retried as in (3). If no webhooks can be claimed, that is
logged once. A released slot claims the next webhook at once, so that a fast receiver does not wait.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Generic, Literal, Protocol, TypeVar

import anyio
from anyio.abc import TaskGroup

from ..errors import JobStoreUnavailable
from ..jobs.webhooks import (
    JobNotice,
    Network,
    allowed_networks,
    forbidden_reason,
    signed_headers,
    webhook_payload,
    webhook_retry_delay_s,
)
from .logs import redacted

if TYPE_CHECKING:  # imported for the first webhook
    import aiohttp
    from aiohttp.abc import AbstractResolver

_REPEAT_S = 1.0  # pause before storing a webhook's outcome is tried again
_CONNECT_S = 5.0  # shorter than the whole timeout, so that an unresolvable name counts as no connection
DeliveryOutcome = Literal["delivered", "disabled", "failed", "retried", "unreachable"]
log = logging.getLogger(__name__)


class DueWebhook(JobNotice, frozen=True, kw_only=True):
    """A webhook that is due."""

    owner: str
    url: str
    attempts: int  # number of earlier attempts
    claimed: int  # unix ms, when this attempt began


Webhook = TypeVar("Webhook", bound=DueWebhook)
Observe = Callable[[Webhook], Callable[[DeliveryOutcome, int], None]]
"""Called when an attempt begins; returns a function for the outcome and the receiver's status, 0 for none."""


class WebhookConfig(Protocol):
    """The section `jobs.webhooks` of a configuration."""

    @property
    def allowed_networks(self) -> Sequence[str]: ...
    @property
    def concurrency(self) -> int: ...
    @property
    def timeout_s(self) -> float: ...


class WebhookQueue(Protocol[Webhook]):
    """The queue of webhooks. Each method may raise JobStoreUnavailable. `counts_unreachable`: whether an attempt
    without a connection counts as a failed attempt. `idle_s`: time between two polls.
    """

    counts_unreachable: bool
    idle_s: float = 0.5

    async def claim(self, limit: int, in_flight: Collection[Webhook]) -> Sequence[Webhook]:
        """Return up to `limit` webhooks that are due. `in_flight`: the webhooks that are being sent."""

    async def signing_secrets(self, owner: str) -> tuple[str, ...]:
        """Return an owner's valid secrets, newest first."""

    async def finish(self, webhook: Webhook, outcome: DeliveryOutcome, delay_s: float) -> object:
        """Store the outcome of an attempt. `delay_s`: the delay before a retry."""


@dataclass(eq=False, repr=False)
class WebhookSender(Generic[Webhook]):
    """A sender of due webhooks; `close` its HTTP client. `change` waits some seconds at most until one is due."""

    queue: WebhookQueue[Webhook]
    config: WebhookConfig
    _: KW_ONLY
    observe: Observe[Webhook] | None = None  # counts and traces attempts
    change: Callable[[float], Awaitable[object]] = asyncio.sleep
    resolver: AbstractResolver | None = None  # a replacement of DNS in tests
    tls: ssl.SSLContext | None = None  # trusted authorities; None: the system's
    clock: Callable[[], float] | None = None  # a replacement of the time of the claim in tests; unix time, s
    rng: Callable[[], float] = random.random  # returns uniform random numbers in [0, 1)

    def __post_init__(self) -> None:
        """Check the configuration. Raises ConfigError for an invalid `allowed_networks`."""
        self._allowed = allowed_networks(self.config.allowed_networks)
        self._in_flight: list[Webhook] = []
        self._fault = ""
        self._released = asyncio.Event()
        self._client: aiohttp.ClientSession | None = None

    async def run(self) -> None:
        """Send webhooks until cancelled."""
        try:
            async with anyio.create_task_group() as tasks:
                while True:
                    self._released.clear()
                    await self._begin_due(tasks)
                    await self._wait()
        finally:
            with anyio.CancelScope(shield=True):
                await self.close()

    async def _begin_due(self, tasks: TaskGroup) -> None:
        fault = ""
        try:
            self._begin(await self._claim(), tasks)
        except JobStoreUnavailable as error:
            fault = error.message
        except Exception as error:
            fault = f"an unexpected fault, {redacted(error)}"
        if fault and fault != self._fault:
            log.warning("No webhooks are sent: %s.", fault)
        elif self._fault and not fault:
            log.info("Webhooks are sent again.")
        self._fault = fault

    async def _wait(self) -> None:
        """Wait until a slot is free, or a webhook may be due."""
        released = asyncio.ensure_future(self._released.wait())
        changed = asyncio.ensure_future(self.change(self.queue.idle_s))
        try:
            await asyncio.wait((released, changed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            released.cancel()
            changed.cancel()

    async def deliver_due(self) -> int:
        """Send as many due webhooks as there are slots, and wait. Returns their number. Raises JobStoreUnavailable."""
        due = await self._claim()
        async with anyio.create_task_group() as tasks:
            self._begin(due, tasks)
        return len(due)

    async def _claim(self) -> Sequence[Webhook]:
        free = self.config.concurrency - len(self._in_flight)
        return await self.queue.claim(free, self._in_flight) if free > 0 else ()

    def _begin(self, due: Sequence[Webhook], tasks: TaskGroup) -> None:
        for webhook in due:
            self._in_flight.append(webhook)
            tasks.start_soon(self._deliver, webhook)

    async def close(self) -> None:
        """Close the HTTP client."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _deliver(self, webhook: Webhook) -> None:
        try:
            secrets = await self.queue.signing_secrets(webhook.owner)
            end_attempt = None if self.observe is None else self.observe(webhook)
            try:
                outcome, status = await self._post(webhook, secrets)
            except Exception as error:  # a fault of one webhook must not stop the others
                log.error(
                    "Webhook %s was not delivered, because of an unexpected fault: %s.", webhook.id, redacted(error)
                )
                outcome, status = "retried", 0
            delay_s: float | None = 0.0
            if outcome == "retried" or (outcome == "unreachable" and self.queue.counts_unreachable):
                delay_s = webhook_retry_delay_s(webhook.attempts + 1, self.rng())
                outcome = "failed" if delay_s is None else "retried"
            if end_attempt is not None:
                end_attempt(outcome, status)
            await self.queue.finish(webhook, outcome, delay_s or 0.0)
        except JobStoreUnavailable as error:
            log.warning("Webhook %s: the delivery will be repeated: %s.", webhook.id, error.message)
            await anyio.sleep(_REPEAT_S)
        finally:
            self._in_flight.remove(webhook)
            self._released.set()

    async def _post(self, webhook: Webhook, secrets: tuple[str, ...]) -> tuple[DeliveryOutcome, int]:
        """Send a webhook. Returns the outcome and the receiver's status; 0 if there was none."""
        body = webhook_payload(webhook)
        signed_at = webhook.claimed / 1000.0 if self.clock is None else self.clock()
        signed = signed_headers(webhook.message_id, body, secrets, signed_at)
        import aiohttp

        try:
            async with self._session().post(
                webhook.url, data=body.encode(), headers=signed, allow_redirects=False
            ) as response:
                status = response.status  # the body is not read: the connection is closed instead
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            log.info("Webhook %s: the receiver cannot be reached: %s.", webhook.id, type(error).__name__)
            return "unreachable", 0  # (4)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            log.info("Webhook %s was not delivered: %s.", webhook.id, type(error).__name__)
            return "retried", 0  # (3)
        if 200 <= status < 300:
            return "delivered", status  # (1)
        log.info("Webhook %s: the receiver answered with HTTP %d.", webhook.id, status)
        return ("disabled" if status == 410 else "retried"), status  # (2), (3)

    def _session(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._client is None:
            timeout_s = self.config.timeout_s
            connector = aiohttp.TCPConnector(
                resolver=self.resolver,
                use_dns_cache=False,
                force_close=True,
                limit=self.config.concurrency,
                socket_factory=_guarded_socket_factory(self._allowed),
                ssl=True if self.tls is None else self.tls,
            )
            self._client = aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=timeout_s, connect=min(_CONNECT_S, timeout_s / 2.0)),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,  # a proxy would open the connection, to an unchecked address
                auto_decompress=False,
                headers={"user-agent": "causeway-webhooks"},
            )
        return self._client


def _guarded_socket_factory(allowed: tuple[Network, ...]) -> Callable[[aiohttp.AddrInfoType], socket.socket]:
    """Return aiohttp's socket factory, which raises OSError for a forbidden address. It is called for each address
    right before connecting, so no name is resolved between check and connection.
    """

    def open_socket(info: aiohttp.AddrInfoType) -> socket.socket:
        family, kind, protocol, _, address = info
        reason = forbidden_reason(str(address[0]), allowed)
        if reason:
            raise OSError(f"The address {reason}.")
        return socket.socket(family=family, type=kind, proto=protocol)

    return open_socket
