"""The text of a stored answer, for clients that followed it while it was made."""

from __future__ import annotations

import msgspec


class _AnswerMessage(msgspec.Struct):
    content: str | None = None


class _AnswerChoice(msgspec.Struct):
    message: _AnswerMessage | None = None
    text: str = ""


class _StoredAnswer(msgspec.Struct):
    choices: list[_AnswerChoice] = []


def answer_text(result: bytes) -> str:
    """Return the text of an answer's only choice; "" for an answer of several.

    Args:
        result: the body of a chat completion or completion; b"": there is none
    """
    choices = msgspec.json.decode(result, type=_StoredAnswer).choices if result else []
    if len(choices) != 1:
        return ""
    first = choices[0]
    return (first.message.content or "") if first.message is not None else first.text
