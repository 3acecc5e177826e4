"""The question of a request, whose answer the semantic cache may give to another one that means the same."""

from __future__ import annotations

import msgspec

from ..types import Request


def question_of(request: Request) -> str | None:
    """Return the text that the semantic cache compares: the last message, of the user, or the only prompt.

    None: nothing is compared, because the question is not text alone, or because the answer repeats it.
    """
    if request.kind == "chat" and request.messages:
        last = request.messages[-1]
        plain = last.role == "user" and not last.tool_calls
        return last.content if plain and isinstance(last.content, str) else None
    if request.kind == "completion" and len(request.prompts) == 1 and not request.echo and request.suffix is None:
        prompt = request.prompts[0]
        return prompt if isinstance(prompt, str) else None
    return None


def without_question(request: Request) -> Request:
    """Return the request with an empty text where `question_of` finds the question."""
    if request.kind == "chat":
        last = msgspec.structs.replace(request.messages[-1], content="")
        return msgspec.structs.replace(request, messages=(*request.messages[:-1], last))
    return msgspec.structs.replace(request, prompts=("",))
