"""Requests made from others: a request rebuilt from its recorded features (`decide.features_of`), and its question.

`decide`, `plan_cache` and every `request.*` signal give the same result for a request and for the one that `request_of`
rebuilds from its features. A test compares them for any request.
"""

from __future__ import annotations

from typing import Final

import msgspec

from ..types import (
    AudioPart,
    FilePart,
    ImagePart,
    Message,
    Modality,
    Part,
    Request,
    RequestFeatures,
    ResponseFormat,
    RoutingHints,
    Sampling,
    TextPart,
    Tool,
    ToolChoice,
)

_PARTS: Final[dict[Modality, Part]] = {
    "text": TextPart(""),
    "image": ImagePart(""),
    "audio": AudioPart("", ""),
    "file": FilePart(""),
}
_NO_PROMPT: Final = ("",)


def request_of(features: RequestFeatures) -> Request:
    """Return a request without content that is routed like the recorded one."""
    kind = features.kind
    if kind == "transcription" or kind == "speech":
        return Request(kind="chat", model="")  # an audio request: it had no decision, and no target serves this model
    chat = kind == "chat"
    return Request(
        kind=kind,
        model=features.model,
        messages=(Message("user", tuple([_PARTS[name] for name in features.modalities])),) if chat else (),
        prompts=_NO_PROMPT * features.prompts,
        max_tokens=features.max_tokens,
        sampling=Sampling(temperature=features.temperature),
        n=features.n,
        stream=features.stream,
        tools=(Tool("tool"),) if features.offers_tools else (),
        tool_choice=ToolChoice("auto" if features.tools else "none"),
        response_format=ResponseFormat("json_object") if features.json else None,
        logprobs=0 if features.logprobs else None,
        hints=RoutingHints(
            prefer=features.prefer, tags=features.tags, client=features.client, deadline_ms=features.deadline_ms
        ),
    )


def question_of(request: Request) -> str | None:
    """Return the text that the semantic cache compares: the last message, of the user, or the only prompt.

    The cached answer may serve another question with the same meaning. None: the request is not compared, because its
    question is not plain text, or because the answer repeats it.
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
