"""Sends the webhooks of jobs: one POST for each, until the receiver has taken it.

1. 2xx: delivered. 410: disabled. Any other status, a redirect included, and no status in time count as an attempt, and
   another follows after a pause, for about three days.
2. A receiver without a connection is away, as the box may be offline for weeks: that is no attempt. It is tried again
   after a pause that doubles up to ten minutes, with the oldest webhook alone.
3. The address is checked when the socket is opened; one that is forbidden counts as away, since its name may be
   corrected.
4. What was cut off by the end of the daemon is sent again: a receiver may get a webhook twice, with the same id.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import ssl
from collections import Counter
from functools import partial
from typing import NamedTuple

import aiohttp
import anyio
import anyio.abc
from aiohttp.abc import AbstractResolver

from router.errors import CausewayError, ConfigError, JobStoreUnavailable
from router.jobs.webhooks.address import Network, allowed_networks, forbidden_reason
from router.jobs.webhooks.payload import webhook_payload
from router.jobs.webhooks.schedule import webhook_retry_delay_s
from router.serving.logs import redacted

from ...clock import Clock
from ...config.schema import WebhookConfig
from ..feed import JobFeed
from ..record import WebhookStatus
from ..store import JobStore
from ..tables.values import DueWebhook
from ..tables.webhooks import receiver_of

log = logging.getLogger(__name__)

_POLL_S = 1.0  # for jobs that end without a run, and for pauses that end
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 600.0
_MOST_AWAY = 1000  # receivers whose pauses are remembered


class _Away(NamedTuple):
    until: float  # monotonic, s
    pause_s: float


class WebhookSender:
    """Sends what is due.

    Args:
        resolver: replaces DNS in tests.
    """

    def __init__(
        self,
        store: JobStore,
        feed: JobFeed,
        config: WebhookConfig,
        clock: Clock,
        chance: random.Random,
        *,
        resolver: AbstractResolver | None = None,
    ) -> None:
        """Raises ConfigError for an invalid `jobs.webhooks`."""
        self._store = store
        self._feed = feed
        self._config = config
        self._clock = clock
        self._chance = chance
        self._resolver = resolver
        self._allowed = allowed_networks(config.allowed_networks)
        self._tls = _context(config.ca_file)
        self._sending: dict[int, str] = {}  # the receiver of each that is being sent
        self._away: dict[str, _Away] = {}
        self._released = asyncio.Event()
        self.unreachable = 0
        """Attempts without a connection so far."""

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            while not self._store.stats.webhooks_due:
                await self._feed.change(_POLL_S)
            async with self._client() as client, anyio.create_task_group() as tasks:
                while self._store.stats.webhooks_due:
                    self._released.clear()
                    if not await self._start_due(client, tasks):
                        await self._wait()

    async def _start_due(self, client: aiohttp.ClientSession, tasks: anyio.abc.TaskGroup) -> bool:
        """Start what has a slot. Returns whether there was something."""
        free = self._config.concurrency - len(self._sending)
        if free <= 0:
            return False
        try:
            due = await self._store.due_webhooks(free, self._blocked(), self._sending)
        except CausewayError:  # the store says so
            return False
        started = False
        for webhook in due:
            receiver = receiver_of(webhook.url)
            if receiver in self._blocked():
                continue
            self._sending[webhook.number] = receiver
            tasks.start_soon(self._send, client, webhook, receiver)
            started = True
        return started

    async def _wait(self) -> None:
        """Until a slot is free, a job has ended, or a moment has passed."""
        released = asyncio.ensure_future(self._released.wait())
        changed = asyncio.ensure_future(self._feed.change(_POLL_S))
        try:
            await asyncio.wait((released, changed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            released.cancel()
            changed.cancel()

    def _blocked(self) -> set[str]:
        """Receivers that get nothing now: all their slots are taken, or they are away. (2)"""
        now, busy = self._clock.monotonic(), Counter(self._sending.values())
        full = {receiver for receiver, count in busy.items() if count >= self._config.concurrency_per_receiver}
        trying = {receiver for receiver in self._away if busy[receiver]}
        return full | trying | {receiver for receiver, away in self._away.items() if now < away.until}

    async def _send(self, client: aiohttp.ClientSession, webhook: DueWebhook, receiver: str) -> None:
        try:
            secrets = await self._store.webhook_secrets(webhook.owner)
            status = await self._post(client, webhook, secrets)
            if status is None:
                self.unreachable += 1
                self._pause(receiver)
                return
            self._away.pop(receiver, None)
            await self._report(webhook, status)
        except JobStoreUnavailable:  # it is sent again
            await anyio.sleep(_POLL_S)
        except Exception as error:  # of one webhook, which the others survive
            log.error("a webhook could not be sent: %s", redacted(error))
            self._pause(receiver)
        finally:
            del self._sending[webhook.number]
            self._released.set()

    async def _report(self, webhook: DueWebhook, status: int) -> None:
        """Store what became of an attempt. `status`: of the receiver; 0: none in time. (1)"""
        result: WebhookStatus = "delivered" if 200 <= status < 300 else "disabled" if status == 410 else "failed"
        if result == "failed":
            delay_s = webhook_retry_delay_s(webhook.attempts + 1, self._chance.random())
            log.info("%s: the receiver answered %s", webhook.notice.id, status or "nothing in time")
            if delay_s is not None:
                await self._store.postpone_webhook(webhook.number, delay_s)
                return
        await self._store.finish_webhook(webhook.number, result)

    async def _post(self, client: aiohttp.ClientSession, webhook: DueWebhook, secrets: tuple[str, ...]) -> int | None:
        """Return the receiver's status; 0: it gave none; None: there is no connection to it."""
        from router.jobs.webhooks.signing import signed_headers  # not before the first webhook

        body, described = webhook_payload(webhook.notice, self._config.format)
        signed = signed_headers(webhook.notice.message_id, body, secrets, self._clock.unix())
        try:
            async with client.post(
                webhook.url, data=body.encode(), headers=described | signed, allow_redirects=False
            ) as response:
                return response.status  # the body is not read: the connection is closed instead
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            log.info("%s: no connection to the receiver: %s", webhook.notice.id, type(error).__name__)
            return None
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            log.info("%s: not delivered: %s", webhook.notice.id, type(error).__name__)
            return 0

    def _pause(self, receiver: str) -> None:
        earlier = self._away.pop(receiver, None)
        pause_s = _FIRST_PAUSE_S if earlier is None else min(earlier.pause_s * 2.0, _LONGEST_PAUSE_S)
        if len(self._away) >= _MOST_AWAY:
            del self._away[next(iter(self._away))]
        until = self._clock.monotonic() + pause_s * (0.8 + 0.4 * self._chance.random())
        self._away[receiver] = _Away(until, pause_s)

    def _client(self) -> aiohttp.ClientSession:
        timeout_s = self._config.timeout_s
        connector = aiohttp.TCPConnector(
            resolver=self._resolver,
            use_dns_cache=False,
            force_close=True,
            limit=self._config.concurrency,
            socket_factory=partial(_guarded_socket, self._allowed),
            ssl=self._tls,
        )
        return aiohttp.ClientSession(
            connector=connector,
            # Names that no server resolves count as no connection: `connect` ends before `total`.
            timeout=aiohttp.ClientTimeout(total=timeout_s, connect=min(5.0, timeout_s / 2.0)),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,  # a proxy would open the connection, to an unchecked address
            auto_decompress=False,
            headers={"user-agent": "causeway-webhooks"},
        )


def _guarded_socket(allowed: tuple[Network, ...], info: aiohttp.AddrInfoType) -> socket.socket:
    """Open a socket for aiohttp, which calls this right before it connects: no name is resolved in between. (3)"""
    family, kind, protocol, _, address = info
    reason = forbidden_reason(str(address[0]), allowed)
    if reason:
        raise OSError(f"the address {reason}")
    return socket.socket(family=family, type=kind, proto=protocol)


def _context(ca_file: str) -> ssl.SSLContext | bool:
    if not ca_file:
        return True
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{ca_file} cannot be read: {error}", where="jobs.webhooks.ca_file") from error
