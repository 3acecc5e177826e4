"""The sections `tiers` and `parts` of the gateway's configuration."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from causeway_server.router.config import Count, Positive, Seconds, doc
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

    shadow: Annotated[
        bool,
        doc(
            "Send the variant copies of the share's requests after the tier's own model has answered them. Its answers "
            "are compared and never shown."
        ),
    ] = False


class TierConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model upstream under the name that callers use."""

    name: Annotated[str, Meta(min_length=1), doc("Name of the tier, which clients send as `model`.")] = DEFAULT_TIER
    aliases: Annotated[tuple[str, ...], doc("Other names for the tier.")] = ()
    triton: Annotated[str, doc("Address (host:port) of Triton's gRPC.")] = DEFAULT_TRITON
    endpoints: Annotated[
        tuple[str, ...],
        doc("Several addresses instead of `triton`: `host:port` or `dns:name:port`, each with an optional `@zone`."),
    ] = ()
    upstream: UpstreamConfig = UpstreamConfig()
    region: Annotated[
        str,
        doc(
            "Region of all the tier's servers. Requests that are bound to regions reach only tiers in them. Empty: "
            "outside every region."
        ),
    ] = ""
    load_balancing: Annotated[
        LoadBalancing,
        doc("`least_loaded`, or `prefix_affinity`: a prompt also goes where most of it is in the KV cache."),
    ] = "least_loaded"
    model: Annotated[str, doc("Name of the model in Triton, or at the `upstream`. Empty: the tier's name.")] = ""
    can: Annotated[
        tuple[TierAbility, ...],
        Meta(min_length=1),
        doc(
            "Abilities that clients may use: `chat`, `completion`, `embedding`. `audio`, `image`, `file` alone: an "
            "encoder, which reads such parts for other tiers; beside `chat`: the model gets such parts itself. "
            "Encoders and tiers of `[embedding]` need no template."
        ),
    ] = ("chat", "completion")
    variants: Annotated[
        tuple[TierVariantConfig, ...],
        doc("Other models in the same servers, each for a share of the requests that this tier answers."),
    ] = ()
    trial: Annotated[TrialConfig, doc("Comparison of the variants with the tier's own model.")] = TrialConfig()
    adapter: Annotated[str, doc("LoRA adapter for the tier's requests, vLLM's `lora_name` in Triton. Empty: none.")] = (
        ""
    )
    adapters: Annotated[
        dict[str, str],
        doc(
            "LoRA adapters as models of their own, `name for clients: adapter`, beside the tier's own model and in the "
            "same servers: the server's model name over HTTP, vLLM's `lora_name` in Triton."
        ),
    ] = {}
    artifact: Annotated[
        str, doc("Artifact that supplies chat template, control tokens and context length. Empty: the tier's name.")
    ] = ""
    template_file: Annotated[
        str, doc("Jinja chat template that replaces the artifact's, for vLLM or TensorRT-LLM in Triton.")
    ] = ""
    tokenizer_file: Annotated[
        str, doc("The model's `tokenizer.json`, for counts of tokens, with `template_file` only. Needs `tokenizers`.")
    ] = ""
    special_tokens: Annotated[
        tuple[str, ...], doc("Tokens that a user's text must not be able to spell, with `template_file` only.")
    ] = ()
    bos: Annotated[str, doc("Beginning-of-sequence token, with `template_file` only.")] = ""
    eos: Annotated[str, doc("End-of-sequence token, with `template_file` only.")] = ""
    context_tokens: Annotated[Count, doc("Context length in tokens. 0: the artifact's.")] = 0
    context_overflow: Annotated[
        Overflow,
        doc(
            "Chats that exceed the context: `refuse` (400), or `trim_middle`: the oldest turns after the system "
            "messages are left out, where the gateway can count the model's tokens; `x-causeway-trimmed` says how "
            "many messages."
        ),
    ] = "refuse"
    max_tokens: Annotated[Count, doc("Maximum tokens of an answer if the request sets none. 0: the whole context.")] = 0
    max_sequences: Annotated[Positive, doc("Maximum sequences (prompts × n) of one request; larger ones get 400.")] = (
        128
    )
    concurrency: Annotated[
        Positive,
        doc(
            "Maximum sequences in one endpoint's Triton at once. The tier's permits are this times its active "
            "endpoints, divided between the gateways and workers that share a Redis."
        ),
    ] = 16
    min_concurrency: Annotated[
        Count,
        doc(
            "Lower bound of a gateway's concurrency limit, which adapts to the times to first token. 0: the limit is "
            "fixed at the gateway's share of the permits."
        ),
    ] = 1
    ttft_objective_s: Annotated[Seconds, doc("Objective of interactive requests: time to first token.")] = 2.0
    max_queued: Annotated[Count, doc("Maximum sequences that may wait to start; a further request gets 429.")] = 64
    admission: AdmissionConfig = AdmissionConfig()
    max_attempts: Annotated[
        Positive, doc("Maximum endpoints tried for one request before its first token. 1: no retry.")
    ] = 3
    retry_budget: RetryBudgetConfig = RetryBudgetConfig()
    restrict_tool_arguments: Annotated[
        bool, doc("Restrict tool-call arguments to words of the user's message, for artifacts with `answers: calls`.")
    ] = True
    guided_key: Annotated[
        GuidedKey,
        doc("Parameter of vLLM for grammars: `structured_outputs` since release 25.09, `guided_decoding` before."),
    ] = "guided_decoding"

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

    max_parts: Annotated[Positive, doc("Maximum audio, image and file parts in one request.")] = 8
    audio_timeout_s: Annotated[
        Seconds, doc("Maximum time for each audio part, waiting included; the answer then continues without it.")
    ] = 20.0
    image_timeout_s: Annotated[
        Seconds, doc("Maximum time for each image or file, waiting included; the answer then continues without it.")
    ] = 10.0
    language: Annotated[
        str,
        Meta(pattern=r"^([a-z]{2,3})?$"),
        doc("Language of audio, such as `en`, where the request names none. Empty: detected for each part."),
    ] = ""
    fact_cache_entries: Annotated[
        Count, doc("Number of audio and image parts whose facts are cached in memory, separately for each tenant.")
    ] = 256
    fact_cache_ttl_s: Annotated[Seconds, doc("Time for which a cached fact is used.")] = 600.0


def too_many_sequences(request: Request, limit: str) -> InvalidRequest:
    """Return the error for a request with more sequences than `limit`, which names the bound, allows."""
    count, prompts = request.sequences, max(1, len(request.prompts))
    text = f"The request has {count} sequences ({prompts} prompts × n={request.n}), but {limit}. Send several requests."
    return InvalidRequest(text, param="prompt" if prompts > 1 else "n")
