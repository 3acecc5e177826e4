"""The shared cache as the rest of the gateway uses it: rules for answers that may be cached, their keys, and the store.

The rules are those of the edge: no sampled answers, no tools, no private requests. Three rules are specific to the
cloud: the tier's temperature applies to requests without one; an answer that repeats the prompt (`echo`) is not cached,
because prompts never enter the cache; and a key belongs to one tenant.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from secrets import token_hex

import msgspec
from prometheus_client import CollectorRegistry

from causeway_server.router.decision.decide import fingerprint
from causeway_server.router.errors import ConfigError
from causeway_server.router.policy.signals import is_sampled
from causeway_server.router.residency import permits, region_tags, regions_of
from causeway_server.router.types import Request, Usage, folded_tags

from ..core.request_context import CachedAnswer
from ..redis.config import RedisAddress
from ..storage.encryption import NO_CIPHER, ContentCipher
from ..tiers.tier import Tier
from ..tiers.variants import TierVariants
from .config import CacheConfig
from .entry_codec import EntryCodec
from .store import AnswerStore, CacheMetrics, RedisUnavailable

NO_STORE = "no-store"
"""The tag that `Cache-Control: no-store` stands for. It is private without being in `private_tags`."""


def bypass_reason(request: Request, tier: Tier, config: CacheConfig) -> str:
    """Return why the request must bypass the cache; "" if it may use it."""
    if not config.enabled:
        return "off"
    if request.kind == "embedding":
        return "embeddings"
    if is_private(request, config):
        return "private"
    if request.hints.tags and not permits(regions_of(request.hints.tags), config.region):
        return "region"
    if request.echo:
        return "echo"
    if request.tools and not config.include_tools:
        return "tools"
    if is_sampled(request, tier.chat_format.temperature) and not (
        config.include_seeded and request.sampling.seed is not None
    ):
        return "sampled"
    return ""


def is_private(request: Request, config: CacheConfig) -> bool:
    """Return whether no data of the request may be stored."""
    return not {NO_STORE, *folded_tags(config.private_tags)}.isdisjoint(request.hints.tags)


class CacheKeys:
    """Derives unguessable cache keys from `secret`, `version`, and everything that shapes a prompt."""

    def __init__(self, config: CacheConfig, secret: bytes = b"") -> None:
        self._salt = (hashlib.blake2b(secret).digest() if secret else b"", config.version)
        self._scopes: dict[tuple[str, str, str], bytes] = {}  # by tier, variant and adapter

    def key(self, request: Request, tier: Tier, tenant: str) -> str:
        """Return the key, 32 hex digits: a one-way digest that does not reveal the prompt."""
        place = (tier.name, tier.variant, tier.adapted)
        scope = self._scopes.get(place)
        if scope is None:
            identity = msgspec.msgpack.encode(
                (self._salt, tier.name, tier.model, tier.config.adapter, tier.max_tokens, tier.chat_format)
            )
            scope = self._scopes[place] = hashlib.blake2b(identity, digest_size=32).digest()
        # The scope has a fixed length, so no tenant's name can be confused with it. A name has no NUL.
        tags = request.hints.tags
        owner = "\0".join((tenant, *region_tags(regions_of(tags)))) if tags else tenant
        return fingerprint(_resolved(request, tier), scope + owner.encode("utf-8", "replace")).hex()


def _resolved(request: Request, tier: Tier) -> Request:
    """Return the request as the tier sees it: with the tier's name for an alias, and its default temperature."""
    sampling = request.sampling
    if sampling.temperature is None:
        sampling = msgspec.structs.replace(sampling, temperature=tier.chat_format.temperature)
    return msgspec.structs.replace(request, model=tier.name, sampling=sampling)


def cached_usage(usage: Usage) -> Usage:
    """Return the usage of a cached answer: all prompt tokens count as cached, and no tokens of the tier were used."""
    return msgspec.structs.replace(usage, cached_tokens=usage.prompt_tokens)


_MIN_SECRET_BYTES = 16


class CacheSecrets(msgspec.Struct, frozen=True):
    """The content of `cache.secret_file`, and the cipher of stored answers."""

    secret: bytes = b""
    cipher: ContentCipher = NO_CIPHER


class SharedCache:
    """The rules, the keys and the store of one gateway. Raises ConfigError if `address` is unusable.

    Args:
        variants: Variants of the tiers, which share no entries.
        clock: Monotonic clock, in seconds.
        now_ms: Replacement for Redis's clock in tests; negative to use Redis's clock.
    """

    def __init__(
        self,
        config: CacheConfig,
        address: RedisAddress,
        tiers: Mapping[str, Tier],
        registry: CollectorRegistry,
        *,
        secrets: CacheSecrets | None = None,
        variants: TierVariants | None = None,
        clock: Callable[[], float] = time.monotonic,
        now_ms: Callable[[], int] = lambda: -1,
    ) -> None:
        secrets = secrets or CacheSecrets()
        self.config = config
        self.metrics = CacheMetrics(registry)
        self.codec = EntryCodec(
            secrets.secret, compress_above_bytes=config.compress_above_bytes, max_entry_bytes=config.max_entry_bytes
        )
        self.store = AnswerStore(
            address,
            config,
            self.codec,
            self.metrics,
            gateway_id=token_hex(8),
            cipher=secrets.cipher,
            clock=clock,
            now_ms=now_ms,
        )
        self._keys = CacheKeys(config, secrets.secret)
        self._tiers = tiers
        self.variants = TierVariants() if variants is None else variants

    def key(self, request: Request, tenant: str) -> str | None:
        """Return the cache key; None if the request bypasses the cache."""
        tier = self._tiers.get(request.model)
        if tier is None or bypass_reason(request, tier, self.config):
            return None
        tier = self.variants.of(tier, request) if self.variants.active else tier
        return self._keys.key(request, tier, tenant)

    async def find_stale(self, request: Request, tenant: str) -> CachedAnswer | None:
        """Return the last answer if younger than `ttl_s` + `stale_if_error_s`. Bounded in time; never raises."""
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
        raise ConfigError(
            f"The secret in the file must have at least {_MIN_SECRET_BYTES} bytes.", where="cache.secret_file"
        )
    return secret
