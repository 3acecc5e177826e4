"""A model's chat template and control tokens, and how a caller's text is kept from spelling a control token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from models.catalog.artifact import Answers, ArtifactError
from models.catalog.gguf import read_metadata
from models.chat.template import MARK, thinking_of
from router.errors import ConfigError
from router.reasoning import Thinking
from router.tool_calls.formats import PLAIN, ToolFormat, tool_format
from router.types import Transcripts

_GUARDED = (2, 3)  # tokenizer.ggml.token_type of the tokens that a caller's text must not spell: unknown, control


class ChatFormat(msgspec.Struct, frozen=True):
    """A model's chat template, the tokens around it and its defaults.

    `special` are the control tokens as text. Where a caller's text spells one, it is broken up: with a MARK if the
    engine is ours (`is_ours`; it drops the MARK again), with a space otherwise.
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
