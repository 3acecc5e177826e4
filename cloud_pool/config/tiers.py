"""What the gateway knows of a tier's model before it asks Triton: how messages become its prompt, and its limits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import msgspec

from models.catalog.artifact import Answers, ArtifactError, find_artifact
from models.chat.template import MARK, render
from models.function_calls.grammar import copy_source_of
from router.errors import ConfigError, UnsupportedFeature
from router.types import Request

from .schema import Config, TierConfig

_GUARDED = (2, 3)  # tokenizer.ggml.token_type of the tokens that text must not be able to say: unknown, control


class ChatFormat(msgspec.Struct, frozen=True):
    """A model's chat template and the tokens around it.

    `special` are the control tokens as text. A caller's text that spells one is broken up: by a MARK where the engine
    is ours, which drops it again, and by a space for any other.
    """

    template: str
    bos: str = ""
    eos: str = ""
    special: tuple[str, ...] = ()
    context_tokens: int = 0
    reads_marks: bool = False
    temperature: float = 1.0  # where the caller names none
    answer_tokens: int = 0  # the most of an answer where the caller names no limit; 0: no such bound
    answers: Answers = "text"  # calls: each is held to the words of what was said
    weights: str = ""  # SHA-256 of the artifact: other weights, other answers; "" where there is none


class Tier(msgspec.Struct, frozen=True):
    config: TierConfig
    chat_format: ChatFormat

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def model(self) -> str:
        """In Triton."""
        return self.config.model or self.config.name

    @property
    def max_tokens(self) -> int:
        """Of an answer where the caller names none. The engine stops at the end of its context in any case."""
        chat_format = self.chat_format
        return (
            self.config.max_tokens
            or chat_format.answer_tokens
            or self.config.context_tokens
            or chat_format.context_tokens
            or 1024
        )

    def copy_source(self, request: Request) -> str | None:
        """What the answer's words are held to; None: it is free."""
        return copy_source_of(request) if self.chat_format.answers == "calls" else None

    def prompts(self, request: Request) -> tuple[str, ...]:
        """The text of each prompt. Raises InvalidRequest."""
        if request.kind == "chat":
            return (self._rendered(request),)
        found = []
        for at, prompt in enumerate(request.prompts):
            if not isinstance(prompt, str):
                raise UnsupportedFeature(
                    "Triton's models take text, not token ids. Send a string.", param=f"prompt[{at}]"
                )
            found.append(prompt)
        return tuple(found)

    def _rendered(self, request: Request) -> str:
        if not self.chat_format.template:
            raise UnsupportedFeature(
                f"the tier {self.name!r} has no chat template: use /v1/completions", param="messages"
            )
        chat_format = self.chat_format
        guard = "".join(sorted({text[0] for text in chat_format.special if text}))
        tools = () if request.tool_choice.mode == "none" else request.tools
        text = render(
            chat_format.template, request.messages, tools, bos=chat_format.bos, eos=chat_format.eos, guard=guard
        )
        return text if chat_format.reads_marks else escape_special_tokens(text, chat_format.special)


def escape_special_tokens(text: str, special: tuple[str, ...]) -> str:
    """`text` without its marks, and with a space in each special token that a caller's text spells."""
    parts = text.split(MARK)
    plain, at, made = "".join(parts), 0, []
    for part in parts[:-1]:
        at += len(part)
        # The mark stood behind the first letter of what may be a special token.
        made.append(f"{part} " if part and plain.startswith(special, at - 1) else part)
    return "".join([*made, parts[-1]])


def load_tiers(config: Config) -> tuple[Tier, ...]:
    """Raises ConfigError."""
    return tuple(Tier(tier, _chat_format(tier, config, f"tiers[{at}]")) for at, tier in enumerate(config.tiers))


def by_name(tiers: tuple[Tier, ...]) -> Mapping[str, Tier]:
    return {name: tier for tier in tiers for name in (tier.name, *tier.config.aliases)}


def _chat_format(tier: TierConfig, config: Config, where: str) -> ChatFormat:
    if tier.template_file:
        try:
            template = Path(tier.template_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(str(error), where=f"{where}.template_file") from error
        return ChatFormat(template, tier.bos, tier.eos, tier.special_tokens, tier.context_tokens)
    try:
        artifact = find_artifact(tier.artifact or tier.name, [Path(folder) for folder in config.model_dirs])
    except ArtifactError as error:
        raise ConfigError(f"{error}; name an `artifact` or a `template_file`", where=where) from error
    manifest = artifact.manifest
    temperature = 1.0 if manifest.temperature is None else manifest.temperature
    chat_format = read_chat_format(artifact.path)
    return msgspec.structs.replace(
        chat_format,
        temperature=temperature,
        answer_tokens=manifest.answer_tokens,
        answers=manifest.answers if tier.call_grammar else "text",
        weights=manifest.sha256,
    )


def read_chat_format(path: Path) -> ChatFormat:
    """From a GGUF file's metadata; the weights are not read. Raises ConfigError."""
    try:
        reader = gguf.GGUFReader(path)
        found = {name: field.contents() for name, field in reader.fields.items() if _is_wanted(name)}
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ConfigError(f"not a readable GGUF file ({error})", where=str(path)) from error
    tokens = found.get("tokenizer.ggml.tokens", [])
    kinds = found.get("tokenizer.ggml.token_type", [])

    def token(name: str) -> str:
        index = found.get(f"tokenizer.ggml.{name}_token_id")
        return str(tokens[index]) if isinstance(index, int) and index < len(tokens) else ""

    context = next((value for name, value in found.items() if name.endswith(".context_length")), 0)
    return ChatFormat(
        template=str(found.get("tokenizer.chat_template", "")),
        bos=token("bos"),
        eos=token("eos"),
        special=tuple(str(text) for text, kind in zip(tokens, kinds, strict=False) if kind in _GUARDED),
        context_tokens=int(context),
        reads_marks=True,
    )


def _is_wanted(name: str) -> bool:
    return name.endswith(".context_length") or name in {
        "tokenizer.chat_template",
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.token_type",
        "tokenizer.ggml.bos_token_id",
        "tokenizer.ggml.eos_token_id",
    }
