"""The sections `tiers` and `parts` of the gateway's configuration."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from causeway_server.router.config import Count, Positive, Seconds
from causeway_server.router.errors import InvalidRequest
from causeway_server.router.types import Modality, Request

from ..admission.permits import AdmissionConfig, AdmissionSettings
from ..dispatch.config import LoadBalancing, RetryBudgetConfig
from ..dispatch.discovery import EndpointAddress, parse_endpoint_address
from ..upstreams.triton.messages import GuidedKey

TierAbility = Literal["chat", "completion", "embedding", "audio", "image", "file"]
PARTS: tuple[Modality, ...] = ("audio", "image", "file")
"""What an encoder reads."""
NO_AUDIO = "this gateway understands no audio: have its operator configure an encoder (a tier that `can: [audio]`)."
DEFAULT_TIER = "assistant-large"
DEFAULT_TRITON = "127.0.0.1:8001"


class TierConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model in Triton under the name that callers use."""

    name: Annotated[str, Meta(min_length=1)] = DEFAULT_TIER  # what clients write as `model`
    aliases: tuple[str, ...] = ()  # other names for the tier
    triton: str = DEFAULT_TRITON  # host:port of Triton's gRPC
    # instead of `triton`, many: `host:port` or `dns:name:port`, each with an optional `@zone`
    endpoints: tuple[str, ...] = ()
    # `least_loaded`, or `prefix_affinity`: a conversation also returns to the endpoint that cached its prefix
    load_balancing: LoadBalancing = "least_loaded"
    model: str = ""  # the model's name in Triton; empty: the tier's name
    # what clients may ask of it: `chat`, `completion`, `embedding`; or what it reads, being an encoder: `audio`,
    # `image`, `file`; a tier of `[embedding]` and an encoder need no template
    can: Annotated[tuple[TierAbility, ...], Meta(min_length=1)] = ("chat", "completion")
    # LoRA adapter of the model that the tier's requests use, `lora_name` in Triton's vLLM backend; empty: none
    adapter: str = ""
    artifact: str = ""  # supplies chat template, control tokens and context length; empty: the tier's name
    template_file: str = ""  # a Jinja chat template instead of the artifact's, for a stock vLLM or TensorRT-LLM tier
    special_tokens: tuple[str, ...] = ()  # with `template_file`: tokens that a user's text must not be able to spell
    bos: str = ""  # with `template_file`: the beginning-of-sequence token
    eos: str = ""  # with `template_file`: the end-of-sequence token
    context_tokens: Count = 0  # context length; 0: the artifact's
    max_tokens: Count = 0  # limit of an answer where the request has none; 0: the whole context
    max_sequences: Positive = 128  # sequences (prompts × n) of one request; more are refused with 400
    # upper bound of sequences in one endpoint's Triton at once; the tier's permits are this times
    # the endpoints that take requests, divided between the gateways and workers that share a Redis
    concurrency: Positive = 16
    # lower bound of a gateway's limit, which follows the times to first token; 0: the limit is its part of the permits
    min_concurrency: Count = 1
    ttft_objective_s: Seconds = 2.0  # objective for interactive requests, from arrival to first token
    max_queued: Count = 64  # sequences that may wait for their request to begin; beyond that clients get 429
    admission: AdmissionConfig = AdmissionConfig()
    max_attempts: Positive = 3  # endpoints that one request may be sent to before its first token; 1: no retry
    retry_budget: RetryBudgetConfig = RetryBudgetConfig()
    # restrict tool-call arguments to words of the user's message, for artifacts with `answers: calls`
    restrict_tool_arguments: bool = True
    # where the tier's vLLM backend reads grammars: `structured_outputs` since release 25.09
    guided_key: GuidedKey = "guided_decoding"

    @property
    def is_encoder(self) -> bool:
        """Whether it reads parts of requests, and generates nothing."""
        return set(self.can).issubset(PARTS)

    @property
    def admission_settings(self) -> AdmissionSettings:
        """The settings with which a gateway starts, before it knows how many endpoints take requests."""
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
        """Raises ConfigError."""
        return tuple(parse_endpoint_address(text) for text in self.endpoints or (self.triton,))


class PartsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Audio, images and files in requests, which encoder tiers (`can: [audio]`, `[image]`, `[file]`) read."""

    max_parts: Annotated[int, Meta(ge=1)] = 8  # audio, images and files of one request
    audio_timeout_s: Seconds = 20.0  # for each audio clip, the wait included; then the answer does without it
    image_timeout_s: Seconds = 10.0  # for each image or file, the wait included
    # language of audio clips where the request names none, as `en`; empty: each clip's is found out
    language: Annotated[str, Meta(pattern=r"^([a-z]{2,3})?$")] = ""
    # audio clips and images whose facts are kept in memory, for one tenant each
    fact_cache_entries: Annotated[int, Meta(ge=0)] = 256
    fact_cache_ttl_s: Seconds = 600.0  # how long


def too_many_sequences(request: Request, limit: str) -> InvalidRequest:
    """Return the error for a request with more sequences than `limit`, which names the bound, allows."""
    count, prompts = request.sequences, max(1, len(request.prompts))
    text = f"the request has {count} sequences ({prompts} prompts × n={request.n}), but {limit}. Send several requests."
    return InvalidRequest(text, param="prompt" if prompts > 1 else "n")
