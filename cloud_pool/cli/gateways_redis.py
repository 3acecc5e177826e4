"""The Redis that the gateways share, for commands: from their configuration, a URL, or both."""

from __future__ import annotations

from pathlib import Path

import redis.asyncio

from router.errors import ConfigError

from ..config.loader import Flags, load_config
from ..redis.connect import ConnectionOptions, open_redis


def open_gateways_redis(config: Path | None, url: str | None) -> redis.asyncio.Redis:
    """Create a client.

    Args:
        config: the gateways' YAML file, which may name a user and certificates.
        url: replaces the file's URL.

    Raises:
        ConfigError: there is no Redis, or the file or the URL is unusable.
    """
    address = load_config(config, Flags(redis=url)).redis
    if not address:
        raise ConfigError("give --redis, or a --config that names the gateways' Redis", where="redis")
    return open_redis(address, "redis", ConnectionOptions())
