"""The shared cache as the rest of the gateway sees it: its rules, its keys and its Redis."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry

from router.errors import ConfigError
from router.types import Request

from ..config.tiers import Tier
from ..serving.request_context import CachedAnswer
from .config import CacheConfig
from .entry_codec import EntryCodec
from .metrics import CacheMetrics
from .rules import CacheKeys, refusal
from .store import AnswerStore, RedisUnavailable

_SECRET_BYTES = 16  # at least


class SharedCache:
    """`tiers` by name and alias. `home` names this gateway to the others."""

    def __init__(
        self,
        config: CacheConfig,
        redis_url: str,
        tiers: Mapping[str, Tier],
        registry: CollectorRegistry,
        *,
        secret: bytes = b"",
        home: str = "",
        clock: Callable[[], float] = time.monotonic,
        now_ms: Callable[[], int] = lambda: -1,
    ) -> None:
        """Raises ConfigError."""
        self.config = config
        self.metrics = CacheMetrics(registry)
        self.codec = EntryCodec(
            secret, compress_above_bytes=config.compress_above_bytes, max_entry_bytes=config.max_entry_bytes
        )
        home = home or secrets.token_hex(8)
        self.store = AnswerStore(redis_url, config, self.codec, self.metrics, home=home, clock=clock, now_ms=now_ms)
        self._keys = CacheKeys(config, secret)
        self._tiers = tiers

    def key(self, request: Request, tenant: str) -> str | None:
        """None: the answer must be kept out of the cache."""
        tier = self._tiers.get(request.model)
        if tier is None or refusal(request, tier, self.config):
            return None
        return self._keys.key(request, tier, tenant)

    async def stale(self, request: Request, tenant: str) -> CachedAnswer | None:
        """The last answer to the same question, however old within `ttl_s` and `stale_if_error_s`: better than a
        refusal. Bounded in time; never raises."""
        key = self.key(request, tenant)
        if key is None:
            return None
        try:
            return await self.store.stale(key, self.config.ttl_s + self.config.stale_if_error_s)
        except RedisUnavailable:
            return None


def read_secret(config: CacheConfig) -> bytes:
    """Raises ConfigError."""
    if not config.secret_file:
        return b""
    try:
        secret = Path(config.secret_file).read_bytes().strip()
    except OSError as error:
        raise ConfigError(str(error), where="cache.secret_file") from error
    if len(secret) < _SECRET_BYTES:
        raise ConfigError(f"a secret has at least {_SECRET_BYTES} bytes", where="cache.secret_file")
    return secret
