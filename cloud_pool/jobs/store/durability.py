"""Whether this Redis keeps what it acknowledged when it is killed.

A gateway starts without its Redis, for it answers interactive requests all the same; it takes no job before the
question is answered with yes. A worker waits for its Redis.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal

import anyio

from router.errors import ConfigError

from ..backoff import job_retry_delay_s
from ..errors import JobStoreNotDurable, JobStoreRefused, JobStoreUnavailable
from .redis_client import RedisClient, items, text

_log = logging.getLogger("causeway.cloud.jobs")
_WANTED: Mapping[str, str] = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}
_AGAIN_S = 30.0  # another Redis may have taken its place
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 15.0


def faults(settings: Mapping[str, str]) -> tuple[str, ...]:
    """What would lose an accepted job, as `name is …: set it to …`."""
    return tuple(
        f"{name} is {settings.get(name, 'unknown')}: set it to {value}"
        for name, value in _WANTED.items()
        if settings.get(name) != value and not (name == "maxmemory-policy" and settings.get("maxmemory") == "0")
    )


class DurabilityCheck:
    """With `warn`, what is found is logged and taken as it is."""

    def __init__(
        self,
        database: RedisClient,
        wanted: Literal["require", "warn"],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
        rng: Callable[[], float] = random.random,
    ) -> None:
        self._database = database
        self._wanted = wanted
        self._clock = clock
        self._sleep = sleep
        self._rng = rng
        self._good_until = float("-inf")

    async def ensure(self) -> None:
        """Raises StoreForgets, or StoreUnavailable where it cannot be asked."""
        if self._clock() < self._good_until:
            return
        found = await self._look()
        if found:
            message = f"an accepted job could be lost by this Redis: {'; '.join(found)}"
            if self._wanted == "require":
                raise JobStoreNotDurable(f"{message}. Or accept that with jobs.durability: warn.", retry_after_s=30.0)
            _log.warning(message)
        self._good_until = self._clock() + _AGAIN_S

    async def wait(self) -> None:
        """Until Redis answers, with longer and longer pauses, each said. Raises ConfigError for one that may forget."""
        tried = 0
        while True:
            try:
                await self.ensure()
                break
            except JobStoreNotDurable as error:
                raise ConfigError(error.message, where="redis") from error
            except JobStoreUnavailable as error:
                tried += 1
                pause_s = job_retry_delay_s(tried, self._rng() / 2.0, base_s=_FIRST_PAUSE_S, cap_s=_LONGEST_PAUSE_S)
                _log.warning("waiting for Redis: %s; asked again in %.1f s", error.message, pause_s)
            await self._sleep(pause_s)
        if tried:
            _log.info("Redis answers")

    async def _look(self) -> tuple[str, ...]:
        """A Redis that hides its settings counts as one that may forget."""
        settings: dict[str, str] = {}
        try:
            for name in (*_WANTED, "maxmemory"):
                flat = items(await self._database.command("CONFIG", "GET", name))
                settings |= {text(key): text(value) for key, value in zip(flat[::2], flat[1::2], strict=True)}
        except JobStoreRefused as error:
            return (f"its settings are hidden: {error.message}",)
        return faults(settings)
