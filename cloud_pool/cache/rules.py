"""Which answers may be cached, and under which key. Pure.

The rules are the edge's: no sampled answers, no tools, nothing private. Three are the cloud's own: where the request
has no temperature the tier's counts; an answer that repeats the prompt (`echo`) is not cached, because prompts never
enter the cache; and a key belongs to one tenant.
"""

from __future__ import annotations

import hashlib

import msgspec

from router.decision.decide import fingerprint
from router.policy.signals import is_sampled
from router.types import Request, Usage, folded_tags

from ..tiers.tier import Tier
from .config import CacheConfig

NO_STORE = "no-store"
"""The tag that stands for `Cache-Control: no-store`; it is private without being in `private_tags`."""


def bypass_reason(request: Request, tier: Tier, config: CacheConfig) -> str:
    """Return why the request must bypass the cache; "" if it may use it."""
    if not config.enabled:
        return "off"
    if request.kind == "embedding":
        return "embeddings"
    if is_private(request, config):
        return "private"
    if request.echo:
        return "echo"
    if request.resume:
        return "rest of an answer"
    if request.tools and not config.include_tools:
        return "tools"
    if is_sampled(request, tier.chat_format.temperature) and not (
        config.include_seeded and request.sampling.seed is not None
    ):
        return "sampled"
    return ""


def is_private(request: Request, config: CacheConfig) -> bool:
    """Whether nothing of the request may be kept."""
    return not {NO_STORE, *folded_tags(config.private_tags)}.isdisjoint(request.hints.tags)


class CacheKeys:
    """Cache keys, from `secret` (which makes them unguessable), `version` and all that shapes a tier's prompt."""

    def __init__(self, config: CacheConfig, secret: bytes = b"") -> None:
        self._salt = (hashlib.blake2b(secret).digest() if secret else b"", config.version)
        self._scopes: dict[str, bytes] = {}  # by tier

    def key(self, request: Request, tier: Tier, tenant: str) -> str:
        """Return 32 hex digits, a one-way digest: no prompt can be read from it."""
        scope = self._scopes.get(tier.name)
        if scope is None:
            identity = msgspec.msgpack.encode(
                (self._salt, tier.name, tier.model, tier.config.adapter, tier.max_tokens, tier.chat_format)
            )
            scope = self._scopes[tier.name] = hashlib.blake2b(identity, digest_size=32).digest()
        # The scope has a fixed length, so no tenant's name can be confused with it.
        return fingerprint(_resolved(request, tier), scope + tenant.encode("utf-8", "replace")).hex()


def _resolved(request: Request, tier: Tier) -> Request:
    """The request as the tier sees it: the tier's name instead of an alias, its temperature where there is none."""
    sampling = request.sampling
    if sampling.temperature is None:
        sampling = msgspec.structs.replace(sampling, temperature=tier.chat_format.temperature)
    return msgspec.structs.replace(request, model=tier.name, sampling=sampling)


def cached_usage(usage: Usage) -> Usage:
    """Return the usage of an answer that cost its client no tokens of the tier: all prompt tokens count as cached."""
    return msgspec.structs.replace(usage, cached_tokens=usage.prompt_tokens)
