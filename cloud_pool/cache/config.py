"""The `cache` section of the configuration."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from causeway_server.router.config import Count, Pause, Positive, Seconds, doc
from causeway_server.router.errors import ConfigError
from causeway_server.router.openai.wire import Tag

from ..redis.config import RedisAddress

_BACKGROUND_TIMEOUT_S = 0.5


class CacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    enabled: Annotated[bool, doc("Whether to share answers between the gateways. This needs a Redis.")] = False
    redis: Annotated[
        RedisAddress, doc("Redis of the cache: a URL, or keys as in `redis`. Empty: the Redis of `redis`.")
    ] = ""
    region: Annotated[
        str, doc("Region of the cache's Redis. Requests that are bound to other regions bypass the cache.")
    ] = ""
    ttl_s: Annotated[Seconds, doc("Time for which an answer is fresh.")] = 300.0
    stale_if_error_s: Annotated[
        Pause, doc("Additional time for which an expired answer may be used instead of an error.")
    ] = 3600.0
    include_seeded: Annotated[bool, doc("Whether to cache sampled answers whose request has a seed.")] = False
    include_tools: Annotated[bool, doc("Whether to cache answers to requests that offer tools.")] = False
    private_tags: Annotated[tuple[Tag, ...], doc("Tags of requests that bypass the cache.")] = ("private",)
    version: Annotated[
        str, doc("Text that becomes part of each key. A new value starts an empty cache, for example for new weights.")
    ] = ""
    secret_file: Annotated[
        str,
        doc("File with the gateways' shared secret. Without it, prompts can be guessed from keys, and entries forged."),
    ] = ""
    key_prefix: Annotated[str, Meta(pattern=r"^[^{}\s]+\Z"), doc("Prefix of all Redis keys.")] = "causeway:cache"
    max_entry_bytes: Annotated[Positive, doc("Maximum size of an answer that is stored.")] = 262_144
    compress_above_bytes: Annotated[Count, doc("Size above which entries are compressed.")] = 1024
    max_buffer_bytes: Annotated[
        Positive, doc("Maximum buffer of a shared answer in progress. A longer answer accepts no new followers.")
    ] = 1 << 20
    lease_s: Annotated[
        float,
        Meta(gt=0, le=30),
        doc("Lease of the gateway that generates a shared answer. Without renewal the gateway counts as dead."),
    ] = 3.0
    max_followed: Annotated[Positive, doc("Maximum number of answers of other gateways that one gateway follows.")] = 64
    redis_timeout_s: Annotated[
        Seconds, doc("Maximum time of a Redis call. A slower request is answered without the cache.")
    ] = 0.05
    redis_retry_after_s: Annotated[Seconds, doc("Pause in the use of Redis after a failure.")] = 1.0

    def for_background(self) -> CacheConfig:
        """Return the configuration for work without a waiting client, such as jobs.

        A Redis call may take up to half a second, but a lease still outlives a few calls.
        """
        redis_timeout_s = max(self.redis_timeout_s, min(_BACKGROUND_TIMEOUT_S, self.lease_s / 4))
        return msgspec.structs.replace(self, redis_timeout_s=redis_timeout_s)

    def check(self, shared: RedisAddress) -> None:
        """Check the section. Raises ConfigError. `shared`: the Redis that the gateways share."""
        if self.enabled and not (self.redis or shared):
            message = "The cache needs a Redis that the gateways share: set `redis` or `cache.redis`."
            raise ConfigError(message, where="cache.enabled")
        if self.lease_s < 4 * self.redis_timeout_s:
            raise ConfigError("The value must be at least four times `cache.redis_timeout_s`.", where="cache.lease_s")
