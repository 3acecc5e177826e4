"""A tier as the gateway uses it: its model's chat format, its prompts, and the callers that may use it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from causeway_server.models.catalog.artifact import Answers, ArtifactError, find_artifact
from causeway_server.models.catalog.gguf import read_metadata
from causeway_server.models.chat.sandbox import MARK
from causeway_server.models.chat.template import render, takes_images, thinking_of
from causeway_server.router.errors import ConfigError, ModelNotAllowed, ModelNotFound, UnsupportedFeature
from causeway_server.router.openai.audio import OPENAI_MODEL
from causeway_server.router.reasoning import Thinking, closed_thought, thinks
from causeway_server.router.residency import Regions, permits
from causeway_server.router.tool_calls.schema import PLAIN, ToolFormat, copy_source_of, tool_format
from causeway_server.router.types import Modality, Request, Transcripts

from ..dispatch.discovery import TierEndpoints
from .config import PARTS, TierAbility, TierConfig, too_many_sequences

_GUARDED = (2, 3)  # tokenizer.ggml.token_type of the tokens that a caller's text must not spell: unknown, control


class ChatFormat(msgspec.Struct, frozen=True):
    """A model's chat template, the tokens around it and its defaults.

    `special` are the control tokens as text. If a caller's text spells one, it is broken up: with a MARK for our own
    engine (`is_ours`), which drops the MARK again; with a space otherwise.
    """

    template: str
    bos: str = ""
    eos: str = ""
    special: tuple[str, ...] = ()
    context_tokens: int = 0
    is_ours: bool = False
    temperature: float = 1.0  # default where the request has none
    answer_tokens: int = 0  # default `max_tokens` where the request has none; 0: no such default
    answers: Answers = "text"  # calls: tool-call arguments are restricted to words of the user's message
    tools: ToolFormat = PLAIN
    thinking: Thinking = ""
    transcripts: Transcripts = "written"  # the form in which the model reads transcripts
    tokenizer: str = ""  # file with the vocabulary: the artifact's GGUF, or the tier's `tokenizer_file`
    weights: str = ""  # version of the artifact, part of the cache key; "": no artifact


def escape_special_tokens(text: str, special: tuple[str, ...]) -> str:
    """Remove the marks from `text` and put a space into each special token that a caller's text spells."""
    parts = text.split(MARK)
    plain, at, pieces = "".join(parts), 0, []
    for part in parts[:-1]:
        at += len(part)
        # The mark stands behind the first letter of a possible special token.
        pieces.append(f"{part} " if part and plain.startswith(special, at - 1) else part)
    return "".join([*pieces, parts[-1]])


def read_chat_format(path: Path) -> ChatFormat:
    """Read the chat format from a GGUF file's metadata, without reading the weights. Raises ConfigError."""
    try:
        metadata = read_metadata(path, _is_wanted)
    except ArtifactError as error:
        raise ConfigError(str(error)) from error
    tokens = _sequence(metadata.get("tokenizer.ggml.tokens"))
    kinds = _sequence(metadata.get("tokenizer.ggml.token_type"))

    def token(name: str) -> str:
        index = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return str(tokens[index]) if isinstance(index, int) and index < len(tokens) else ""

    context = next((value for name, value in metadata.items() if name.endswith(".context_length")), 0)
    template = str(metadata.get("tokenizer.chat_template", ""))
    return ChatFormat(
        template=template,
        tools=tool_format(template),
        thinking=thinking_of(template),
        bos=token("bos"),
        eos=token("eos"),
        special=tuple(str(text) for text, kind in zip(tokens, kinds, strict=False) if kind in _GUARDED),
        context_tokens=context if isinstance(context, int) else 0,
        is_ours=True,
    )


def _sequence(value: object) -> Sequence[object]:
    return value if isinstance(value, (list, tuple)) else ()


def _is_wanted(name: str) -> bool:
    return name.endswith(".context_length") or name in {
        "tokenizer.chat_template",
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.token_type",
        "tokenizer.ggml.bos_token_id",
        "tokenizer.ggml.eos_token_id",
    }


InferencePrompt = str | tuple[int, ...]
"""A prompt as text or as token ids."""
_DEFAULT_MAX_TOKENS = 1024
_WORK: Mapping[TierAbility, str] = {
    "chat": "chats",
    "completion": "completions",
    "embedding": "embeddings",
    "audio": "audio clips",
    "image": "images",
    "file": "files",
}


_PATHS: Mapping[TierAbility, tuple[str, ...]] = {
    "chat": ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/realtime"),
    "completion": ("/v1/completions",),
    "embedding": ("/v1/embeddings",),
    "audio": ("/v1/audio/transcriptions",),
}
"""Paths at which a request names a tier, by ability; encoders of images or files are never named."""


class Tier(msgspec.Struct, frozen=True):
    config: TierConfig
    chat_format: ChatFormat
    variant: str = ""  # the variant whose model `config.model` is; "" for the tier's own
    adapted: str = ""  # the name in `adapters` that a client asked for; "": the tier's own

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def model(self) -> str:
        """Name of the model upstream."""
        return self.config.model or self.config.name

    @property
    def max_tokens(self) -> int:
        """Limit of an answer if the request sets none; the engine stops at the end of its context in any case."""
        chat_format = self.chat_format
        return (
            self.config.max_tokens
            or chat_format.answer_tokens
            or self.config.context_tokens
            or chat_format.context_tokens
            or _DEFAULT_MAX_TOKENS
        )

    @property
    def only_embeds(self) -> bool:
        """Whether embeddings are its only ability, so that a probe must be one."""
        return set(self.config.can) == {"embedding"}

    @property
    def endpoints(self) -> TierEndpoints:
        """Endpoints of the tier. Raises ConfigError."""
        config = self.config
        return TierEndpoints(
            self.name, self.model, config.endpoint_addresses, config.load_balancing, self.only_embeds, config.upstream
        )

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths where requests may name the tier; none for an encoder of images or files."""
        renders = bool(self.chat_format.template) or self.config.upstream.kind == "openai"
        able = [ability for ability in self.config.can if ability != "chat" or renders]
        named = [ability for ability in able if ability not in self.config.native_parts]
        return tuple(path for ability in named for path in _PATHS.get(ability, ()))

    def check_ability(self, ability: TierAbility) -> None:
        """Raise UnsupportedFeature if the tier lacks the ability."""
        if ability not in self.config.can or (ability in PARTS and ability in self.config.native_parts):
            able = " and ".join(_WORK[one] for one in self.config.can)
            message = f"The tier {self.name!r} is for {able}, not for {_WORK[ability]}. Name another model."
            raise UnsupportedFeature(message, param="model")

    def check_sequences(self, request: Request) -> None:
        """Raise InvalidRequest if the request exceeds the tier's limit of sequences; embedding lists may exceed it."""
        bound = self.config.max_sequences
        if request.sequences > bound and request.kind != "embedding":
            raise too_many_sequences(
                request, f"the tier {self.name!r} takes at most {bound} sequences in one request (max_sequences)"
            )

    def copy_source(self, request: Request) -> str | None:
        """Return the text that tool-call arguments must be copied from; None: the answer is unrestricted."""
        return copy_source_of(request) if self.chat_format.answers == "calls" else None

    def prompts(self, request: Request) -> tuple[InferencePrompt, ...]:
        """Render the request's prompts: one for a chat, one for each element of a completion's `prompt`.

        Token ids stay ids; only our own engine takes them. Raises InvalidRequest.
        """
        self.check_ability(request.kind)
        if request.kind == "chat":
            return (self._render_chat(request),)
        for index, prompt in enumerate(request.prompts):
            if not isinstance(prompt, str) and not self.chat_format.is_ours:
                raise UnsupportedFeature(
                    f"The tier {self.name!r} takes text, not token ids. Send a string.", param=f"prompt[{index}]"
                )
        return request.prompts

    def _render_chat(self, request: Request) -> str:
        chat_format = self.chat_format
        if not chat_format.template:
            raise UnsupportedFeature(
                f"The tier {self.name!r} has no chat template: use /v1/completions.", param="messages"
            )
        guard = "".join(sorted({text[0] for text in chat_format.special if text}))
        tools = () if request.tool_choice.mode == "none" else request.tools
        text = render(
            chat_format.template,
            request.messages,
            tools,
            bos=chat_format.bos,
            eos=chat_format.eos,
            guard=guard,
            images="image" in self.config.can,
        )
        if chat_format.thinking and not thinks(request, chat_format.thinking):
            text += closed_thought(chat_format.thinking)
        return text if chat_format.is_ours else escape_special_tokens(text, chat_format.special)


def load_tiers(tiers: Iterable[TierConfig], model_dirs: Iterable[str] = ()) -> tuple[Tier, ...]:
    """Load tiers' chat formats, from artifacts (`model_dirs`, then the user's own) or templates. Raises ConfigError."""
    folders = [Path(folder) for folder in model_dirs]
    return tuple(Tier(tier, _load_chat_format(tier, folders, f"tiers[{index}]")) for index, tier in enumerate(tiers))


def by_name(tiers: tuple[Tier, ...]) -> Mapping[str, Tier]:
    """Index the tiers by name and alias. The first audio tier is also `whisper-1`, unless another has that name."""
    index = {name: tier for tier in tiers for name in (tier.name, *tier.config.aliases)}
    index |= {name: _adapted(tier, name, adapter) for tier in tiers for name, adapter in tier.config.adapters.items()}
    if (speech := encoders_of(tiers).get("audio")) is not None:
        index.setdefault(OPENAI_MODEL, index[speech])
    return index


def _adapted(tier: Tier, name: str, adapter: str) -> Tier:
    """Return the tier with one of its adapters; vectors are of the tier's own model."""
    can = tuple(ability for ability in tier.config.can if ability != "embedding")
    changed = {"model": adapter} if tier.config.upstream.is_http else {"model": tier.model, "adapter": adapter}
    return msgspec.structs.replace(tier, config=msgspec.structs.replace(tier.config, can=can, **changed), adapted=name)


def encoders_of(tiers: Iterable[Tier]) -> dict[Modality, str]:
    """Return the name of the tier that reads each kind of part; of several, the first one."""
    encoders: dict[Modality, str] = {}
    for tier in tiers:
        for kind in PARTS:
            if tier.config.is_encoder and kind in tier.config.can:
                encoders.setdefault(kind, tier.name)
    return encoders


def _load_chat_format(tier: TierConfig, folders: list[Path], where: str) -> ChatFormat:
    _check_adapters(tier, where)
    if tier.upstream.is_http:
        return _http_chat_format(tier, where)
    if tier.upstream.is_trtllm:
        _check_trtllm(tier, where)
    _check_tokenizer(tier, f"{where}.tokenizer_file")
    if tier.native_parts and (tier.native_parts != ("image",) or "chat" not in tier.can or not tier.template_file):
        raise ConfigError(
            "A chat tier in Triton can read only one kind of part, `image`, and only with vLLM's backend and a "
            "`template_file`. An encoder needs a tier of its own. Servers of `upstream.kind: openai` can read any "
            "part.",
            where=f"{where}.can",
        )
    if tier.template_file:
        try:
            template = Path(tier.template_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(str(error), where=f"{where}.template_file") from error
        if tier.native_parts and not takes_images(template):
            raise ConfigError("This chat template leaves images out of the prompt.", where=f"{where}.template_file")
        return ChatFormat(
            template,
            tier.bos,
            tier.eos,
            tier.special_tokens,
            tier.context_tokens,
            tools=tool_format(template),
            thinking=thinking_of(template),
            tokenizer=tier.tokenizer_file,
        )
    if tier.is_encoder:
        return ChatFormat("")
    try:
        artifact = find_artifact(tier.artifact or tier.name, folders)
    except ArtifactError as error:
        if set(tier.can) == {"embedding"} and not tier.artifact:
            return ChatFormat("")  # a stock backend's model, whose inputs are sent as they are
        raise ConfigError(f"{error} Name an `artifact` or a `template_file`.", where=where) from error
    manifest = artifact.manifest
    named = {f"adapters.{name}": adapter for name, adapter in tier.adapters.items()}
    for key, adapter in {"adapter": tier.adapter, **named}.items():
        if adapter not in ("", *manifest.adapters):
            known = ", ".join(manifest.adapters) or "none"
            raise ConfigError(
                f"{artifact.name} has no adapter `{adapter}`. Its adapters: {known}.", where=f"{where}.{key}"
            )
    return msgspec.structs.replace(
        read_chat_format(artifact.path),
        temperature=1.0 if manifest.temperature is None else manifest.temperature,
        answer_tokens=manifest.answer_tokens,
        answers=manifest.answers if tier.restrict_tool_arguments else "text",
        weights=artifact.version,
        tokenizer=str(artifact.path),
        transcripts=manifest.transcripts,
    )


def _check_adapters(tier: TierConfig, where: str) -> None:
    """Raise ConfigError for adapters of what generates no text, or without a name."""
    if tier.adapter and "embedding" in tier.can:
        raise ConfigError("An adapter cannot compute embeddings: remove `embedding`.", where=f"{where}.can")
    if tier.adapters and not {"chat", "completion"} & set(tier.can):
        raise ConfigError("Only tiers that generate text can have adapters.", where=f"{where}.adapters")
    if "" in (*tier.adapters, *tier.adapters.values()):
        raise ConfigError("An adapter or its name is empty. Write both.", where=f"{where}.adapters")


def _check_tokenizer(tier: TierConfig, where: str) -> None:
    """Raise ConfigError for a tokenizer's file that is missing, or beside an artifact."""
    if not tier.tokenizer_file:
        return
    if not tier.template_file:
        raise ConfigError(
            "`tokenizer_file` is only for a tier with a `template_file`, because an artifact has its own tokenizer. "
            "Remove `tokenizer_file`.",
            where=where,
        )
    if not Path(tier.tokenizer_file).is_file():
        raise ConfigError(f"The file {tier.tokenizer_file} does not exist.", where=where)


def _check_trtllm(tier: TierConfig, where: str) -> None:
    """Raise ConfigError for what models of TensorRT-LLM have no tensors for."""
    if not set(tier.can).issubset(("chat", "completion")):
        raise ConfigError("Models of TensorRT-LLM support only `chat` and `completion`.", where=f"{where}.can")
    for key in ("adapter", "adapters"):
        if getattr(tier, key):
            raise ConfigError(f"Adapters of TensorRT-LLM are not supported. Remove `{key}`.", where=f"{where}.{key}")
    if not tier.template_file:
        raise ConfigError(
            "Name the file of the model's chat template in `template_file`.", where=f"{where}.template_file"
        )


_RENDERED_UPSTREAM = ("adapter", "artifact", "template_file", "tokenizer_file", "special_tokens", "bos", "eos")


def _http_chat_format(tier: TierConfig, where: str) -> ChatFormat:
    """Return the format of a tier over HTTP, whose server has a template of its own. Raises ConfigError."""
    for key in _RENDERED_UPSTREAM:
        if getattr(tier, key):
            raise ConfigError(
                f"Servers of `kind: openai` render prompts themselves. Remove `{key}`, and list adapters as models "
                "under `adapters`.",
                where=f"{where}.{key}",
            )
    if tier.is_encoder:
        raise ConfigError("An encoder must be a model in Triton (`kind: triton`).", where=f"{where}.can")
    if tier.native_parts and "chat" not in tier.can:
        raise ConfigError("Only chats have audio, images and files. Add `chat` to `can`.", where=f"{where}.can")
    return ChatFormat("", context_tokens=tier.context_tokens)


AllowedTiers = frozenset[str] | None
"""Names of tiers, without aliases; None: all."""


def allowed_tiers(tiers: Mapping[str, Tier], tenants: Collection[str], tokens: Collection[str] | None) -> AllowedTiers:
    """Return the tiers that both the caller's tenant (none: all) and its token (None: all) allow, by name or alias."""
    if not tenants and tokens is None:
        return None
    lists = [names for names in (tenants or None, tokens) if names is not None]
    named = [{tiers[name].name for name in names if name in tiers} for names in lists]
    return frozenset(set.intersection(*named))


def in_regions(tiers: Mapping[str, Tier], allowed: AllowedTiers, regions: Regions) -> AllowedTiers:
    """Return the allowed tiers that are in the regions that bind a request."""
    if regions is None:
        return allowed
    return frozenset(tier.name for tier in usable(tiers, allowed).values() if permits(regions, tier.config.region))


def usable(tiers: Mapping[str, Tier], allowed: AllowedTiers) -> Mapping[str, Tier]:
    """Return the allowed ones of `tiers`, by name and alias."""
    return tiers if allowed is None else {name: tier for name, tier in tiers.items() if tier.name in allowed}


def find_tier(tiers: Mapping[str, Tier], name: str, allowed: AllowedTiers = None) -> Tier:
    """Return the tier of a model's name or alias. Raises ModelNotFound (404) or ModelNotAllowed (403)."""
    tier = tiers.get(name)
    if tier is not None and (allowed is None or tier.name in allowed):
        return tier
    known = ", ".join(name for name, ability in usable(tiers, allowed).items() if ability.paths) or "none"
    if tier is None:
        raise ModelNotFound(f"The model {name[:64]!r} is not a tier of this gateway. Known: {known}.", param="model")
    raise ModelNotAllowed(
        f"You may not use the model {name[:64]!r}: your tenant or your token allows only {known}.", param="model"
    )
