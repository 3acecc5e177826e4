"""The `cache` section of the configuration."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from causeway_server.router.config import Count, Pause, Positive, Seconds
from causeway_server.router.errors import ConfigError
from causeway_server.router.openai.wire import Tag

from ..redis.config import RedisAddress

_BACKGROUND_TIMEOUT_S = 0.5


class CacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    enabled: bool = False
    redis: RedisAddress = ""
    region: str = ""
    ttl_s: Seconds = 300.0
    stale_if_error_s: Pause = 3600.0
    include_seeded: bool = False
    include_tools: bool = False
    private_tags: tuple[Tag, ...] = ("private",)
    version: str = ""
    secret_file: str = ""
    key_prefix: Annotated[str, Meta(pattern=r"^[^{}\s]+\Z")] = "causeway:cache"
    max_entry_bytes: Positive = 262_144
    compress_above_bytes: Count = 1024
    max_buffer_bytes: Positive = 1 << 20
    lease_s: Annotated[float, Meta(gt=0, le=30)] = 3.0
    max_followed: Positive = 64
    redis_timeout_s: Seconds = 0.05
    redis_retry_after_s: Seconds = 1.0

    def for_background(self) -> CacheConfig:
        """Return the configuration for work without a waiting client: a call may take up to half a second."""
        redis_timeout_s = max(self.redis_timeout_s, min(_BACKGROUND_TIMEOUT_S, self.lease_s / 4))
        return msgspec.structs.replace(self, redis_timeout_s=redis_timeout_s)

    def check(self, shared: RedisAddress) -> None:
        """Check the section. Raises ConfigError. `shared`: the Redis that the gateways share."""
        if self.enabled and not (self.redis or shared):
            message = "The cache needs a Redis that the gateways share: set `redis` or `cache.redis`."
            raise ConfigError(message, where="cache.enabled")
        if self.lease_s < 4 * self.redis_timeout_s:
            raise ConfigError("The value must be at least four times `cache.redis_timeout_s`.", where="cache.lease_s")
