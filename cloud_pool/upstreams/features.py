"""Features that the servers of a tier may lack: found at start, and refused by name in requests."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import msgspec

from causeway_server.router.errors import ConfigError, UnsupportedFeature
from causeway_server.router.types import Request

from .clients import UpstreamClients
from .config import FEATURES, Feature, UpstreamConfig
from .openai_http import OpenAIUpstream

_CHECK_S = 5.0
_ADVICE: dict[Feature, str] = {
    "tools": "Give the server a tool-call parser (vLLM: --enable-auto-tool-choice --tool-call-parser)",
    "logprobs": "Start the server with logprobs",
    "schemas": "Start the server with structured outputs",
}
_ABSENT: dict[Feature, tuple[str, str]] = {  # what a request asks for, and its field
    "tools": ("tools", "tools"),
    "logprobs": ("logprobs", "logprobs"),
    "schemas": ("JSON answers", "response_format"),
}


class TierServers(msgspec.Struct, frozen=True):
    """A chat tier over HTTP. `where`: path of its section `upstream` in the configuration."""

    where: str
    model: str
    config: UpstreamConfig


async def verify_features(tiers: Sequence[TierServers], clients: UpstreamClients) -> None:
    """Ask each tier's first server for all its features, unless it is silent. Raises ConfigError if it refuses one."""
    refusals: list[tuple[str, Feature, str]] = []

    async def ask(tier: TierServers) -> None:
        # One after the other, and a refusal twice: llama_cpp.server answers 400 where another request comes meanwhile.
        upstream = clients.get(tier.config.urls[0], tier.config)
        assert isinstance(upstream, OpenAIUpstream)
        for feature in FEATURES:
            if feature in tier.config.without:
                continue
            reason = await upstream.refusal_of(tier.model, feature, _CHECK_S)
            if reason and (reason := await upstream.refusal_of(tier.model, feature, _CHECK_S)):
                refusals.append((tier.where, feature, reason))

    async with anyio.create_task_group() as tasks:
        for tier in tiers:
            if tier.config.verify_features:
                tasks.start_soon(ask, tier)
    for where, feature, reason in sorted(refusals):
        raise ConfigError(
            f"The server refuses {feature}: {reason.rstrip('.')}. {_ADVICE[feature]}, or add `{feature}` to `without`.",
            where=f"{where}.without",
        )


def check_features(request: Request, tier: str, config: UpstreamConfig) -> None:
    """Raise UnsupportedFeature for a request that needs what the servers lack. `tier`: its name."""
    asked: dict[Feature, bool] = {
        "tools": bool(request.tools),
        "logprobs": request.logprobs is not None,
        "schemas": request.response_format is not None and request.response_format.kind != "text",
    }
    for feature in config.without:
        if asked[feature]:
            what, param = _ABSENT[feature]
            raise UnsupportedFeature(f"The tier {tier!r} does not support {what}. Remove `{param}`.", param=param)
