"""The Redis that the gateways share, for commands: from their configuration, a URL, or both."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import redis.asyncio
from redis.exceptions import RedisError

from router.errors import CausewayError, ConfigError

from ..config.loader import Flags, load_config
from ..redis.connect import ConnectionOptions, open_redis
from ..redis.faults import client_fault
from ..storage.config import JobsConfig, with_shared_redis


@asynccontextmanager
async def gateways_redis(config: Path | None, url: str | None) -> AsyncIterator[redis.asyncio.Redis]:
    """Open a client for a `with` block.

    Args:
        config: the gateways' YAML file, which may name a user and certificates.
        url: replaces the file's URL.

    Raises:
        ConfigError: there is no Redis, or the file or the URL is unusable.
        CausewayError: it does not answer, or answers with an error.
    """
    address = load_config(config, Flags(redis=url)).redis
    if not address:
        raise ConfigError("give --redis, or a --config that names the gateways' Redis", where="redis")
    client = open_redis(address, "redis", ConnectionOptions())
    try:
        yield client
    except (RedisError, OSError) as error:
        raise CausewayError(client_fault(error, client)) from error
    finally:
        await client.aclose()


def replication_of_gateways_redis(config: Path | None, url: str | None) -> tuple[int, float]:
    """Return how many replicas must at least confirm a write, and in how many seconds: as for an accepted job.

    Raises:
        ConfigError: the file or the URL is unusable.
    """
    gateways = load_config(config, Flags(redis=url))
    jobs = with_shared_redis(gateways.jobs, gateways.redis)
    if jobs.redis != gateways.redis:  # jobs have a Redis of their own
        jobs = JobsConfig(redis=gateways.redis)
    return jobs.replicas_to_wait_for, jobs.replica_timeout_s
