"""The sections `tiers` and `parts` of the gateway's configuration."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from causeway_server.router.config import Count, Positive, Seconds
from causeway_server.router.errors import InvalidRequest
from causeway_server.router.types import Modality, Overflow, Request
from causeway_server.router.variants.settings import TrialConfig, VariantConfig

from ..admission.permits import AdmissionConfig, AdmissionSettings
from ..dispatch.config import LoadBalancing, RetryBudgetConfig
from ..dispatch.discovery import EndpointAddress, parse_endpoint_address, server_address
from ..upstreams.config import UpstreamConfig
from ..upstreams.triton.messages import GuidedKey

TierAbility = Literal["chat", "completion", "embedding", "audio", "image", "file"]
PARTS: tuple[Modality, ...] = ("audio", "image", "file")
"""Kinds of parts that an encoder reads, or that a chat model takes."""
NO_AUDIO = "This gateway does not understand audio: its operator has to configure a tier that `can: [audio]`."
DEFAULT_TIER = "assistant-large"
DEFAULT_TRITON = "127.0.0.1:8001"


class TierVariantConfig(VariantConfig, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A variant of a tier."""

    shadow: bool = False


class TierConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model upstream under the name that callers use."""

    name: Annotated[str, Meta(min_length=1)] = DEFAULT_TIER
    aliases: tuple[str, ...] = ()
    triton: str = DEFAULT_TRITON
    endpoints: tuple[str, ...] = ()
    upstream: UpstreamConfig = UpstreamConfig()
    region: str = ""
    load_balancing: LoadBalancing = "least_loaded"
    model: str = ""
    can: Annotated[tuple[TierAbility, ...], Meta(min_length=1)] = ("chat", "completion")
    variants: tuple[TierVariantConfig, ...] = ()
    trial: TrialConfig = TrialConfig()
    adapter: str = ""
    adapters: dict[str, str] = {}
    artifact: str = ""
    template_file: str = ""
    tokenizer_file: str = ""
    special_tokens: tuple[str, ...] = ()
    bos: str = ""
    eos: str = ""
    context_tokens: Count = 0
    context_overflow: Overflow = "refuse"
    max_tokens: Count = 0
    max_sequences: Positive = 128
    concurrency: Positive = 16
    min_concurrency: Count = 1
    ttft_objective_s: Seconds = 2.0
    max_queued: Count = 64
    admission: AdmissionConfig = AdmissionConfig()
    max_attempts: Positive = 3
    retry_budget: RetryBudgetConfig = RetryBudgetConfig()
    restrict_tool_arguments: bool = True
    guided_key: GuidedKey = "guided_decoding"

    @property
    def is_encoder(self) -> bool:
        """Whether the tier reads parts of requests and generates nothing."""
        return set(self.can).issubset(PARTS)

    @property
    def native_parts(self) -> tuple[Modality, ...]:
        """Kinds of parts that the tier's model gets itself, instead of text from an encoder."""
        return () if self.is_encoder else tuple(kind for kind in PARTS if kind in self.can)

    @property
    def admission_settings(self) -> AdmissionSettings:
        """Settings with which a gateway starts, before it knows how many endpoints accept requests."""
        return AdmissionSettings(
            permits=self.concurrency * len(self.endpoint_addresses),
            # What an encoder takes says nothing about how many wait inside: it depends on the part.
            min_permits=0 if self.is_encoder else self.min_concurrency,
            max_queued=self.max_queued,
            ttft_objective_s=self.ttft_objective_s,
            config=self.admission,
        )

    @property
    def endpoint_addresses(self) -> tuple[EndpointAddress, ...]:
        """Addresses of the endpoints. Raises ConfigError."""
        if self.upstream.is_http:
            return tuple(server_address(url) for url in self.upstream.urls)
        return tuple(parse_endpoint_address(text) for text in self.endpoints or (self.triton,))


class PartsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Audio, images and files in requests, which encoder tiers (`can: [audio]`, `[image]`, `[file]`) read."""

    max_parts: Positive = 8
    audio_timeout_s: Seconds = 20.0
    image_timeout_s: Seconds = 10.0
    language: Annotated[str, Meta(pattern=r"^([a-z]{2,3})?$")] = ""
    fact_cache_entries: Count = 256
    fact_cache_ttl_s: Seconds = 600.0


def too_many_sequences(request: Request, limit: str) -> InvalidRequest:
    """Return the error for a request with more sequences than `limit`, which names the bound, allows."""
    count, prompts = request.sequences, max(1, len(request.prompts))
    text = f"The request has {count} sequences ({prompts} prompts × n={request.n}), but {limit}. Send several requests."
    return InvalidRequest(text, param="prompt" if prompts > 1 else "n")
