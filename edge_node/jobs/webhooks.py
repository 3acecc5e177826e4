"""Notifications about jobs: webhooks to receivers when jobs end, and cancellations to the cloud.

An unreachable receiver delays only its own webhooks:

1. A failed connection does not count as an attempt, as the device may be offline for weeks. The receiver is tried again
   after a pause that doubles up to ten minutes, with its oldest webhook alone.
2. A webhook that the end of the daemon interrupted is sent again.
"""

from __future__ import annotations

import logging
import random
import ssl
from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

import anyio

from causeway_server.router.errors import CausewayError
from causeway_server.router.serving.logs import redacted
from causeway_server.router.serving.tls.contexts import TlsFiles, client_tls
from causeway_server.router.serving.webhooks import DeliveryOutcome, WebhookQueue

from ..backends.cloud.backend import Clouds
from ..clock import Clock
from ..config.schema import OutboxWebhookConfig
from .record import OutboxWebhook
from .rows import receiver_of
from .run import JobFeed
from .store import JobOutbox

log = logging.getLogger(__name__)

_POLL_S = 1.0  # for jobs that end without a run, and an unreachable cloud
_FIRST_PAUSE_S, _MAX_PAUSE_S = 5.0, 600.0
_MAX_AWAY = 1000  # maximum number of receivers whose pauses are remembered
_AT_ONCE = 32  # number of cancellations


class _Away(NamedTuple):
    until: float  # end of the pause, monotonic seconds
    pause_s: float


class ReceiverQueue(WebhookQueue[OutboxWebhook]):
    """The due webhooks, by receiver."""

    counts_unreachable = False  # whether failed connections are counted (1)
    idle_s = _POLL_S

    def __init__(self, store: JobOutbox, config: OutboxWebhookConfig, clock: Clock, rng: random.Random) -> None:
        self._store = store
        self._config = config
        self._clock = clock
        self._rng = rng
        self._away: dict[str, _Away] = {}
        self.unreachable = 0
        """Number of attempts without a connection."""

    async def claim(self, limit: int, in_flight: Collection[OutboxWebhook]) -> list[OutboxWebhook]:
        claimed: list[OutboxWebhook] = []
        if self._store.stats.webhooks_due:
            numbers = [webhook.number for webhook in in_flight]
            for webhook in await self._store.run(self._store.webhooks.due, limit, self._blocked(in_flight), numbers):
                if receiver_of(webhook.url) not in self._blocked([*in_flight, *claimed]):
                    claimed.append(webhook)
        return claimed

    def _blocked(self, in_flight: Collection[OutboxWebhook]) -> set[str]:
        """Return the receivers that get nothing now: their slots are taken or they are unreachable. (1)"""
        now, busy = self._clock.monotonic(), Counter(receiver_of(webhook.url) for webhook in in_flight)
        full = {receiver for receiver, count in busy.items() if count >= self._config.concurrency_per_receiver}
        trying = {receiver for receiver in self._away if busy[receiver]}
        return full | trying | {receiver for receiver, away in self._away.items() if now < away.until}

    async def signing_secrets(self, owner: str) -> tuple[str, ...]:
        return await self._store.run(self._store.webhooks.secrets, owner)

    async def finish(self, webhook: OutboxWebhook, outcome: DeliveryOutcome, delay_s: float) -> None:
        if outcome == "unreachable":
            self.unreachable += 1
            self._pause(receiver_of(webhook.url))
            return
        self._away.pop(receiver_of(webhook.url), None)
        if outcome == "retried":
            await self._store.run(self._store.webhooks.postpone, webhook.number, delay_s)
        else:
            await self._store.run(self._store.webhooks.finish, webhook.number, outcome)

    def _pause(self, receiver: str) -> None:
        earlier = self._away.pop(receiver, None)
        pause_s = _FIRST_PAUSE_S if earlier is None else min(earlier.pause_s * 2.0, _MAX_PAUSE_S)
        if len(self._away) >= _MAX_AWAY:
            del self._away[next(iter(self._away))]
        until = self._clock.monotonic() + pause_s * (0.8 + 0.4 * self._rng.random())
        self._away[receiver] = _Away(until, pause_s)


def trusted_authorities(ca_file: str) -> ssl.SSLContext | None:
    """Return the authorities in `jobs.webhooks.ca_file`; None for the system's. Raises ConfigError."""
    if not ca_file:
        return None
    return client_tls(TlsFiles(where="jobs.webhooks", ca_file=ca_file))


class CloudCanceller:
    """Sends the cancellations of jobs to the cloud, one after the other; while it is unreachable, they wait. A job in
    the cloud continues without its connection: it would be paid for, and its content kept.
    """

    def __init__(self, store: JobOutbox, clouds: Clouds, feed: JobFeed) -> None:
        self._store = store
        self._clouds = clouds
        self._feed = feed

    async def run(self) -> None:
        """Send cancellations until cancelled."""
        while True:
            if not (self._store.stats.cancellations_due and await self._send_due()):
                await self._feed.change(_POLL_S)

    async def _send_due(self) -> bool:
        """Send the due cancellations. Return whether the cloud responded."""
        if self._clouds.is_unreachable:
            return False
        try:
            due = await self._store.run(self._store.cancellations.due, _AT_ONCE)
            for cancellation in due:
                key, _, cloud = cancellation.key.partition("@")
                outcome = await self._clouds.cancel_job(key, cloud)
                if outcome == "later":
                    await anyio.sleep(_POLL_S)
                    return False
                await self._store.run(self._store.cancellations.settle, cancellation, known=outcome == "settled")
        except CausewayError:  # the store reports it
            return False
        except Exception as error:
            log.error("The cloud could not be notified of a cancelled job: %s", redacted(error))
            return False
        return bool(due)
