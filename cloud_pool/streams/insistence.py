"""Steps that are repeated until Redis and the broker answer: a message that was begun is not given up meanwhile."""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from router.errors import JobStoreUnavailable

from ..brokers.port import BrokerUnavailable

_RETRY_S = 0.2
_log = logging.getLogger("causeway.cloud.streams")
T = TypeVar("T")


class Insistence:
    """Pauses between two tries, and how to try until it works. `rng`: uniform in [0, 1)."""

    def __init__(self, rng: Callable[[], float] = random.random) -> None:
        self._rng = rng

    async def pause(self) -> None:
        await anyio.sleep(_RETRY_S * (1.0 + self._rng()))

    async def insist(self, step: Callable[[], Awaitable[T]]) -> T:
        """Repeat a step until it raises neither JobStoreUnavailable nor BrokerUnavailable."""
        fault = ""
        while True:
            try:
                return await step()
            except (JobStoreUnavailable, BrokerUnavailable) as error:
                if not fault:
                    _log.warning("a message waits: %s", error.message)
                fault = error.message
                await self.pause()
