"""A model's reasoning before its answer: `<think>…</think>` in its text, which clients get as `reasoning_content`. The
marks are those of DeepSeek R1, Qwen 3 and QwQ. Some templates end the prompt with `<think>`, so that the answer begins
inside the reasoning. Only the beginning of an answer can be reasoning; elsewhere the marks are plain text.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final, Literal

from .types import Effort, Request

OPEN: Final = "<think>"
CLOSE: Final = "</think>"
Thinking = Literal["", "marked", "open"]
"""The marks of a model's reasoning: "" for none, `marked` for both, `open` if the prompt has the first."""

EFFORT_TOKENS: Final[dict[Effort, int | None]] = {
    "none": 0,
    "minimal": 128,
    "low": 512,
    "medium": 2048,
    "high": None,
    "xhigh": None,
}
"""The maximum number of reasoning tokens by effort; None: no limit."""


def closed_thought(thinking: Thinking) -> str:
    """Return the text that ends a prompt so that the model answers without reasoning."""
    return {"": "", "marked": f"{OPEN}\n\n{CLOSE}\n\n", "open": f"\n{CLOSE}\n\n"}[thinking]


class _ThoughtState(Enum):
    BEGIN = auto()  # only white space so far
    INSIDE = auto()
    AFTER = auto()  # after the end mark, before the answer's first character
    ANSWER = auto()


class ReasoningParser:
    """Splits text, in pieces of any size, into reasoning and answer. `inside`: the prompt ends in the reasoning."""

    def __init__(self, *, inside: bool) -> None:
        self._inside = inside
        self._state = _ThoughtState.BEGIN
        self._held = ""
        self._begun = False  # the reasoning has a visible character
        self.tokens = 0  # number of reasoning tokens, with the marks

    def feed(self, text: str, tokens: int = 0) -> tuple[str, str]:
        """Return the decided reasoning and answer. `tokens`: the number of tokens of the text."""
        thought, answer = "", ""
        thinking = self._thinks
        text, self._held = self._held + text, ""
        while text:
            match self._state:
                case _ThoughtState.BEGIN:
                    text = self._begin(text)
                case _ThoughtState.INSIDE:
                    more, text = self._in_thought(text)
                    thought += more
                case _ThoughtState.AFTER:
                    text = text.lstrip()
                    self._state = _ThoughtState.ANSWER if text else _ThoughtState.AFTER
                case _ThoughtState.ANSWER:
                    answer, text = answer + text, ""
        if thinking or self._thinks:
            self.tokens += tokens
        return thought, answer

    def finish(self) -> tuple[str, str]:
        """Return the held-back text at the end of the answer."""
        held, self._held = self._held, ""
        return (held.rstrip(), "") if self._thinks else ("", held)

    @property
    def _thinks(self) -> bool:
        return self._state is _ThoughtState.INSIDE or (self._state is _ThoughtState.BEGIN and self._inside)

    def _begin(self, text: str) -> str:
        rest = text.lstrip()
        if OPEN.startswith(rest):
            self._held = text
            if rest == OPEN:
                self._state, self._held = _ThoughtState.INSIDE, ""
            return ""
        if rest.startswith(OPEN):
            self._state = _ThoughtState.INSIDE
            return rest[len(OPEN) :]
        self._state = _ThoughtState.INSIDE if self._inside else _ThoughtState.ANSWER
        return rest if self._inside else text

    def _in_thought(self, text: str) -> tuple[str, str]:
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        at = text.find(CLOSE)
        if at >= 0:
            self._state = _ThoughtState.AFTER
            return text[:at].rstrip(), text[at + len(CLOSE) :]
        # The end mark may have begun; white space before it is not part of the reasoning.
        beginning = next((n for n in range(len(CLOSE) - 1, 0, -1) if text.endswith(CLOSE[:n])), 0)
        shown = text[: len(text) - beginning].rstrip()
        self._held = text[len(shown) :]
        return shown, ""


def thinks(request: Request, thinking: Thinking) -> bool:
    """Return whether the model reasons for this request, which it does not if its answer is constrained."""
    if not thinking or request.kind != "chat" or request.reasoning_effort == "none":
        return False
    demanded = request.tools and request.tool_choice.mode in ("required", "function")
    formatted = request.response_format is not None and request.response_format.kind != "text"
    return not (demanded or formatted)


def thinking_limit(request: Request) -> int | None:
    """Return the maximum number of reasoning tokens; None for no limit."""
    return None if request.reasoning_effort is None else EFFORT_TOKENS[request.reasoning_effort]
