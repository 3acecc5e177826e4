"""The check that Redis keeps acknowledged data when it is killed, and that its jobs have this version's layout.

A gateway starts without its Redis, because interactive requests do not need it; it accepts no job before the check has
passed. A worker waits for its Redis.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import anyio

from causeway_server.router.errors import ConfigError, JobStoreUnavailable

from .config import NO_CLUSTER, job_retry_delay_s
from .encryption import NO_CIPHER, ContentCipher, ContentKeyMissing, key_missing
from .redis_client import JobStoreLayoutMismatch, JobStoreRefused, RedisClient, as_fields, as_list, as_text

log = logging.getLogger(__name__)
_REQUIRED: Mapping[str, str] = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}
_CHECK_AGAIN_S = 30.0  # another Redis may have taken its place
_FIRST_DELAY_S = 1.0
_MAX_DELAY_S = 15.0


class JobStoreNotDurable(JobStoreUnavailable, code="job_store_not_durable", retryable=False):
    """Redis may lose acknowledged data because of its settings, so no job is accepted."""


class JobStoreIsCluster(JobStoreUnavailable, code="job_store_is_cluster", retryable=False):
    """Redis is a node of a cluster, which jobs do not support."""


def durability_problems(settings: Mapping[str, str]) -> tuple[str, ...]:
    """Return the settings that could lose an accepted job, each as `NAME is VALUE: set it to VALUE`."""
    return tuple(
        f"{name} is {settings.get(name, 'unknown')}: set it to {value}"
        for name, value in _REQUIRED.items()
        if settings.get(name) != value and not (name == "maxmemory-policy" and settings.get("maxmemory") == "0")
    )


@dataclass(eq=False, repr=False)
class DurabilityCheck:
    """Checks Redis's settings and the layout of its keys, again after 30 s at the earliest."""

    database: RedisClient
    mode: Literal["require", "warn"]  # `require` refuses jobs, `warn` logs the problems and accepts jobs
    cipher: ContentCipher = NO_CIPHER  # cipher, which must have all keys that other processes use
    max_record_age_ms: int = 0  # maximum age of a record, so that no older key is in use
    _: KW_ONLY
    timeout_s: float = 5.0  # time limit of a check, seconds
    sleep: Callable[[float], Awaitable[None]] = anyio.sleep
    rng: Callable[[], float] = random.random  # random numbers, uniform in [0, 1)
    _valid_until: float = float("-inf")
    _warned: str = ""

    async def ensure(self, *, again: bool = False) -> None:
        """Raise an error unless jobs may be accepted. `again`: check even if the last check was recent.

        Raises:
            ContentKeyMissing: Jobs are encrypted with a key that this process lacks.
            JobStoreIsCluster: Redis is a node of a cluster.
            JobStoreLayoutMismatch: The keys have the layout of another version.
            JobStoreNotDurable: Redis could lose a job.
            JobStoreUnavailable: Redis does not answer.
        """
        if time.monotonic() < self._valid_until and not again:
            return
        self._valid_until = float("-inf")
        try:
            with anyio.fail_after(self.timeout_s):
                await self._check()
        except TimeoutError:
            message = f"The job store does not answer in {self.timeout_s:g} s."
            raise JobStoreUnavailable(message, retry_after_s=2.0) from None
        self._valid_until = time.monotonic() + _CHECK_AGAIN_S

    async def _check(self) -> None:
        await self._refuse_cluster()
        await self.database.ensure_layout()
        await self._ensure_keys()
        problems = await self._problems()
        if problems:
            message = f"This Redis could lose an accepted job: {'; '.join(problems)}"
            if self.mode == "require":
                raise JobStoreNotDurable(
                    f"{message}. To accept this risk, set `jobs.durability: warn`.", retry_after_s=30.0
                )
            if message != self._warned:
                log.warning(message)
            self._warned = message

    async def wait(self) -> None:
        """Wait until Redis answers, with growing, logged delays. Raises ConfigError if it can never accept jobs."""
        failures = 0
        while True:
            try:
                await self.ensure()
                break
            except (JobStoreNotDurable, JobStoreLayoutMismatch, JobStoreIsCluster, ContentKeyMissing) as error:
                raise ConfigError(self.database.explain(error), where="redis") from error
            except JobStoreUnavailable as error:
                failures += 1
                delay_s = job_retry_delay_s(failures, self.rng() / 2.0, base_s=_FIRST_DELAY_S, max_s=_MAX_DELAY_S)
                log.warning("Waiting for Redis: %s Next attempt in %.1f s.", self.database.explain(error), delay_s)
            await self.sleep(delay_s)
        if failures:
            log.info("Redis answers.")

    async def _refuse_cluster(self) -> None:
        """Raise JobStoreIsCluster for a node of a cluster, which the URL alone does not reveal."""
        try:
            info = as_text(await self.database.command("INFO", "cluster"))
        except JobStoreRefused:
            return  # This user may not ask; then the operator has to know.
        if "cluster_enabled:1" in info:
            raise JobStoreIsCluster(NO_CLUSTER, retry_after_s=30.0)

    async def _ensure_keys(self) -> None:
        """Announce the key that encrypts now. Raises ContentKeyMissing if another process's key is missing here."""
        announced, now = self.database.key("content_keys"), await self.database.now_ms()
        if key := self.cipher.sealing_key:
            with suppress(JobStoreRefused):  # a full Redis: running jobs may end all the same
                await self.database.command("ZADD", announced, now, key)
                await self.database.command("ZREMRANGEBYSCORE", announced, "-inf", now - self.max_record_age_ms)
        used = as_list(await self.database.command("ZRANGEBYSCORE", announced, now - self.max_record_age_ms, "+inf"))
        if missing := [key for key in map(as_text, used) if not self.cipher.knows(key)]:
            raise key_missing(*missing)

    async def _problems(self) -> tuple[str, ...]:
        """Return the problems of the settings. A Redis that hides its settings counts as not durable."""
        try:
            settings = as_fields(await self.database.command("CONFIG", "GET", *_REQUIRED, "maxmemory"))
        except JobStoreRefused as error:
            return (f"its settings are hidden: {error.message}",)
        return durability_problems({name: value.decode() for name, value in settings.items()})
