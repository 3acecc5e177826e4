"""Tells the cloud of jobs that were cancelled here, also later if it cannot be reached now.

Stopping a run closes its connection, but a job of the cloud goes on without one: it would be paid for, and its content
kept.
"""

from __future__ import annotations

import logging

import anyio

from router.errors import CausewayError
from router.serving.logs import redacted

from ...backends.cloud.backend import CloudBackend
from ..feed import JobFeed
from ..store import JobOutbox

log = logging.getLogger(__name__)

_POLL_S = 1.0
_AT_ONCE = 32


class CloudCanceller:
    """Sends cancellations, one after the other. `cloud` None: this box has none, and nothing was sent to it."""

    def __init__(self, store: JobOutbox, cloud: CloudBackend | None, feed: JobFeed) -> None:
        self._store = store
        self._cloud = cloud
        self._feed = feed

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            if not (self._store.stats.cancellations_due and await self._send_due()):
                await self._feed.change(_POLL_S)

    async def _send_due(self) -> bool:
        """Send what is due. Returns whether the cloud answered something."""
        if self._cloud is None or self._cloud.health.reachable is False:
            return False
        try:
            due = await self._store.due_cancellations(_AT_ONCE)
            for one in due:
                outcome = await self._cloud.cancel_job(one.key)
                if outcome == "later":
                    await anyio.sleep(_POLL_S)
                    return False
                await self._store.settle_cancellation(one, known=outcome == "settled")
        except CausewayError:  # the store says so
            return False
        except Exception as error:
            log.error("the cloud could not be told of a cancelled job: %s", redacted(error))
            return False
        return bool(due)
