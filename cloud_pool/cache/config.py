"""The cache's part of the configuration."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from router.errors import ConfigError

Seconds = Annotated[float, Meta(gt=0)]
Pause = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
_PATIENT_S = 0.5


class CacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    enabled: bool = False  # needs `redis`
    ttl_s: Seconds = 300.0
    stale_if_error_s: Pause = 3600.0  # so much longer an old answer may stand in for a refusal
    include_seeded: bool = False  # keep sampled answers too, where the request has a seed
    include_tools: bool = False  # keep answers to requests that offer tools
    private_tags: tuple[str, ...] = ("private",)  # a request with one of them is kept out
    version: str = ""  # another one makes a fresh cache: change it with a model's weights
    secret_file: str = (
        ""  # shared by the gateways; without it a prompt can be guessed from its key, and an entry forged
    )
    key_prefix: Annotated[str, Meta(pattern=r"^[^{}\s]+\Z")] = "causeway:cache"
    max_entry_bytes: Positive = 262_144  # a larger answer is not kept
    compress_above_bytes: Count = 1024
    max_buffer_bytes: Positive = 1 << 20  # of an answer in the making; a longer one is shared with nobody new
    lease_s: Annotated[float, Meta(gt=0, le=30)] = 3.0  # a leader that is silent for so long has died
    max_followed: Positive = 64  # answers of other gateways that this one reads at once
    redis_timeout_s: Seconds = 0.05  # Redis's time before a request goes on without it
    redis_retry_after_s: Seconds = 1.0  # how long Redis is left alone after a fault

    def patient(self) -> CacheConfig:
        """For work that nobody waits for: Redis has up to `_PATIENT_S`, and a lease still outlives a few calls."""
        redis_timeout_s = max(self.redis_timeout_s, min(_PATIENT_S, self.lease_s / 4))
        return msgspec.structs.replace(self, redis_timeout_s=redis_timeout_s)

    def check(self, redis: str) -> None:
        """Raises ConfigError."""
        if self.enabled and not redis:
            raise ConfigError("the cache is in the Redis that gateways share: set `redis`", where="cache.enabled")
        if self.lease_s < 4 * self.redis_timeout_s:
            raise ConfigError("a lease must outlive a few calls of `cache.redis_timeout_s`", where="cache.lease_s")
