"""The form in which a model family writes its calls, for calls that are required: what stands around their JSON.

The family shows in the chat template of the model. Sources: the templates of the models on Hugging Face; what other
servers know of them is in vLLM's documentation (features/tool_calling) and llama.cpp's (docs/function-calling.md).
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec


class CallFrame(msgspec.Struct, frozen=True):
    """The text before the first call, between two, and after the last. `between` empty: one call only."""

    before: str = ""
    between: str = ""
    after: str = ""


NO_FRAME: Final = CallFrame()


class ToolFormat(msgspec.Struct, frozen=True):
    """A family's form of required calls: a JSON object of `name` and `arguments_key` for each, inside `frame`.

    `several`: the frame where there may be several, if that is another one.
    """

    family: str
    arguments_key: Literal["arguments", "parameters"] = "arguments"
    frame: CallFrame = NO_FRAME
    several: CallFrame | None = None

    def frame_of(self, *, several: bool) -> CallFrame:
        """Return what stands around one call, or around several if the family has a form for that."""
        if several:
            return self.several or self.frame
        return msgspec.structs.replace(self.frame, between="")


PLAIN: Final = ToolFormat("plain")
HERMES: Final = ToolFormat(
    "hermes", frame=CallFrame("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")
)
LLAMA: Final = ToolFormat("llama", "parameters", frame=CallFrame(between="; "))  # as vLLM's llama3_json reads several
MISTRAL: Final = ToolFormat("mistral", frame=CallFrame("[TOOL_CALLS][", ", ", "]"))
PHI: Final = ToolFormat("phi", frame=CallFrame("<|tool_call|>[", ", ", "]<|/tool_call|>"))
GEMMA: Final = ToolFormat("gemma", "parameters", several=CallFrame("[", ", ", "]"))

_SIGNS: Final = (
    ("[TOOL_CALLS]", MISTRAL),
    ("<tool_call>", HERMES),
    ("<|tool|>", PHI),
    ("<|tool_call|>", PHI),
    ("<|start_header_id|>", LLAMA),
    ("<|header_start|>", LLAMA),  # Llama 4
    ("<start_of_turn>", GEMMA),
)
"""What a chat template contains → the format; the first that holds. Hermes' template for Llama 3 has both signs."""


def tool_format(template: str) -> ToolFormat:
    """Return the format of the family that this chat template belongs to; `PLAIN`, JSON alone, for any other."""
    return next((known for sign, known in _SIGNS if sign in template), PLAIN)
