"""What may be kept, and under which key. Pure.

The rules are the edge's: no sampled answers, no tools, nothing private. Three are the cloud's own: the temperature that
counts is the tier's where the caller names none; an answer that repeats the prompt (`echo`) is not kept, for prompts
never enter the cache; and a key belongs to one tenant.
"""

from __future__ import annotations

import hashlib

import msgspec

from router.decision.decide import fingerprint
from router.policy.signals import is_sampled
from router.types import Request, Usage

from ..config.tiers import Tier
from .config import CacheConfig

NO_STORE = "no-store"
"""The tag that `Cache-Control: no-store` becomes; no `private_tags` needs to name it."""


def refusal(request: Request, tier: Tier, config: CacheConfig) -> str:
    """Why the answer must be kept out of the cache; "" when it need not be."""
    if not config.enabled:
        return "off"
    if request.kind == "embedding":
        return "embeddings"
    if NO_STORE in request.hints.tags or not set(config.private_tags).isdisjoint(request.hints.tags):
        return "private"
    if request.echo:
        return "echo"
    if request.resume:
        return "rest of an answer"
    if request.tools and not config.include_tools:
        return "tools"
    if is_sampled(_resolved(request, tier)) and not (config.include_seeded and request.sampling.seed is not None):
        return "sampled"
    return ""


class CacheKeys:
    """Keys of answers. `secret` makes them unguessable; the version and all that words a tier's prompt are in them."""

    def __init__(self, config: CacheConfig, secret: bytes = b"") -> None:
        self._salt = (hashlib.blake2b(secret).digest() if secret else b"", config.version)
        self._scopes: dict[str, bytes] = {}  # by tier

    def key(self, request: Request, tier: Tier, tenant: str) -> str:
        """32 hex digits, a one-way digest: no prompt can be read from it."""
        scope = self._scopes.get(tier.name)
        if scope is None:
            said = msgspec.msgpack.encode((self._salt, tier.name, tier.model, tier.max_tokens, tier.chat_format))
            scope = self._scopes[tier.name] = hashlib.blake2b(said, digest_size=32).digest()
        # The scope has a fixed length, so no tenant's name can run into it.
        return fingerprint(_resolved(request, tier), scope + tenant.encode("utf-8", "replace")).hex()


def _resolved(request: Request, tier: Tier) -> Request:
    """As the tier takes it: its own name, whatever alias was used, and its own temperature where none was named."""
    sampling = request.sampling
    if sampling.temperature is None:
        sampling = msgspec.structs.replace(sampling, temperature=tier.chat_format.temperature)
    return msgspec.structs.replace(request, model=tier.name, sampling=sampling)


def cached(usage: Usage) -> Usage:
    """Of an answer that cost its reader no tokens of the tier: all of the prompt was found."""
    return Usage(usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens)
