"""What routing reads of a request, without its content: for decision records, and for replaying them.

`decide`, `plan_cache` and every `request.*` signal give the same result for a request and for the one that `request_of`
rebuilds from its features. A test compares them for any request.
"""

from __future__ import annotations

from typing import Final

from ..policy.signals import modalities, wants_json, wants_tools
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
from .continue_token import join_token, split_token

_NAME_CHARACTERS: Final = 128  # no target and no model of a policy has a longer name
_PARTS: Final[dict[Modality, Part]] = {
    "text": TextPart(""),
    "image": ImagePart(""),
    "audio": AudioPart("", ""),
    "file": FilePart(""),
}
_NO_PROMPT: Final = ("",)


def features_of(request: Request) -> RequestFeatures:
    hints = request.hints
    return RequestFeatures(
        kind=request.kind,
        model=_name(request.model),
        client=_text(hints.client),
        tags=tuple([_text(tag) for tag in hints.tags]),
        prefer=hints.prefer,
        deadline_ms=hints.deadline_ms,
        stream=request.stream,
        n=request.n,
        prompts=len(request.prompts),
        max_tokens=request.max_tokens,
        temperature=request.sampling.temperature,
        modalities=tuple(modalities(request)),
        offers_tools=bool(request.tools),
        tools=wants_tools(request),
        json=wants_json(request),
        logprobs=request.logprobs is not None,
        continues=None if not request.resume else _name(split_token(request.resume)[0]),
    )


def request_of(features: RequestFeatures) -> Request:
    """Return a request without content that is routed as the recorded one was."""
    chat = features.kind == "chat"
    return Request(
        kind=features.kind,
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
        resume="" if features.continues is None else join_token(features.continues, "token"),
    )


def _name(value: str) -> str:
    """Cut a name that no policy can contain; one character more than the longest keeps it unknown."""
    return _text(value[: _NAME_CHARACTERS + 1])


def _text(value: str) -> str:
    # Header bytes can decode to lone surrogates, which no encoder accepts; signals replace them in the same way.
    return value if value.isascii() else value.encode("utf-8", "replace").decode()
