"""The shared cache as the rest of the gateway sees it: rules, keys and Redis."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry

from router.errors import ConfigError
from router.types import Request

from ..core.request_context import CachedAnswer
from ..redis.config import RedisAddress
from ..tiers.tier import Tier
from .config import CacheConfig
from .entry_codec import EntryCodec
from .rules import CacheKeys, bypass_reason
from .store import AnswerStore, CacheMetrics, RedisUnavailable

_MIN_SECRET_BYTES = 16


class SharedCache:
    """Rules, keys and store of one gateway.

    Args:
        config: the `cache` section.
        address: the Redis that the gateways share.
        tiers: by name and alias.
        registry: for the cache's metrics.
        secret: see `cache.secret_file`.
        clock: monotonic time in seconds.
        now_ms: replaces Redis's clock in tests; negative: use Redis's.

    Raises:
        ConfigError: `address` is unusable.
    """

    def __init__(
        self,
        config: CacheConfig,
        address: RedisAddress,
        tiers: Mapping[str, Tier],
        registry: CollectorRegistry,
        *,
        secret: bytes = b"",
        clock: Callable[[], float] = time.monotonic,
        now_ms: Callable[[], int] = lambda: -1,
    ) -> None:
        self.config = config
        self.metrics = CacheMetrics(registry)
        self.codec = EntryCodec(
            secret, compress_above_bytes=config.compress_above_bytes, max_entry_bytes=config.max_entry_bytes
        )
        self.store = AnswerStore(
            address, config, self.codec, self.metrics, gateway_id=secrets.token_hex(8), clock=clock, now_ms=now_ms
        )
        self._keys = CacheKeys(config, secret)
        self._tiers = tiers

    def key(self, request: Request, tenant: str) -> str | None:
        """Return the cache key; None: the request bypasses the cache."""
        tier = self._tiers.get(request.model)
        if tier is None or bypass_reason(request, tier, self.config):
            return None
        return self._keys.key(request, tier, tenant)

    async def find_stale(self, request: Request, tenant: str) -> CachedAnswer | None:
        """Return the last answer to the same question if it is younger than `ttl_s` + `stale_if_error_s`.

        Bounded in time; never raises.
        """
        key = self.key(request, tenant)
        if key is None:
            return None
        try:
            return await self.store.find_stale(key, self.config.ttl_s + self.config.stale_if_error_s)
        except RedisUnavailable:
            return None


def read_secret(config: CacheConfig) -> bytes:
    """Read `cache.secret_file`; b"" if there is none. Raises ConfigError."""
    if not config.secret_file:
        return b""
    try:
        secret = Path(config.secret_file).read_bytes().strip()
    except OSError as error:
        raise ConfigError(str(error), where="cache.secret_file") from error
    if len(secret) < _MIN_SECRET_BYTES:
        raise ConfigError(f"a secret needs at least {_MIN_SECRET_BYTES} bytes", where="cache.secret_file")
    return secret
