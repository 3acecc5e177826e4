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
    enabled: bool = False  # share answers between the gateways; needs a Redis
    redis: RedisAddress = ""  # as `redis` above, for a cache with a Redis of its own; empty: `redis`
    ttl_s: Seconds = 300.0  # how long an answer is fresh
    stale_if_error_s: Pause = 3600.0  # how much longer an expired answer may be used instead of an error
    include_seeded: bool = False  # also cache sampled answers whose request has a seed
    include_tools: bool = False  # also cache answers to requests that offer tools
    private_tags: tuple[Tag, ...] = ("private",)  # requests with one of these `x-causeway-tags` bypass the cache
    version: str = ""  # part of each key: a new value starts an empty cache, for instance with new weights
    secret_file: str = ""  # shared by the gateways; without it prompts can be guessed from keys, and entries forged
    key_prefix: Annotated[str, Meta(pattern=r"^[^{}\s]+\Z")] = "causeway:cache"  # prefix of all Redis keys
    max_entry_bytes: Positive = 262_144  # a larger answer is not stored
    compress_above_bytes: Count = 1024  # larger entries are compressed
    max_buffer_bytes: Positive = 1 << 20  # of a shared answer in progress; a longer one accepts no new followers
    # a leader that does not renew its lease for this long counts as dead
    lease_s: Annotated[float, Meta(gt=0, le=30)] = 3.0
    max_followed: Positive = 64  # answers of other gateways that a gateway follows at once
    redis_timeout_s: Seconds = 0.05  # for one call; then the request goes on without the cache
    redis_retry_after_s: Seconds = 1.0  # pause after a Redis failure

    def for_background(self) -> CacheConfig:
        """Return the configuration for work without a waiting client, such as jobs.

        Redis gets up to half a second per call, while a lease still outlives a few calls.
        """
        redis_timeout_s = max(self.redis_timeout_s, min(_BACKGROUND_TIMEOUT_S, self.lease_s / 4))
        return msgspec.structs.replace(self, redis_timeout_s=redis_timeout_s)

    def check(self, shared: RedisAddress) -> None:
        """Raises ConfigError. `shared` is the Redis that the gateways share."""
        if self.enabled and not (self.redis or shared):
            message = "the cache is in a Redis that the gateways share: set `redis` or `cache.redis`"
            raise ConfigError(message, where="cache.enabled")
        if self.lease_s < 4 * self.redis_timeout_s:
            raise ConfigError("must be at least four times `cache.redis_timeout_s`", where="cache.lease_s")
