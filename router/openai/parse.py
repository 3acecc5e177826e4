"""A request's bytes → Request, validated once. Every fault is an InvalidRequest that names the key."""

from __future__ import annotations

from typing import Final

from ..errors import InvalidJSON, InvalidRequest, UnknownField, UnsupportedFeature
from ..types import Prefer, Request, RoutingHints, Sampling, ToolChoice
from .messages import choice_of, format_of, messages_of, refuse_legacy, tools_of
from .validation import JSONObject, canonical, load, shape
from .wire import WireChat, WireCompletion, WireEmbedding, WireGeneration, WireRoutingHints

Prompts = tuple[str | tuple[int, ...], ...]

_CHAT_FIELDS: Final = frozenset(WireChat.__struct_fields__)
_COMPLETION_FIELDS: Final = frozenset(WireCompletion.__struct_fields__)
_EMBEDDING_FIELDS: Final = frozenset(WireEmbedding.__struct_fields__)

# Two wishes about one thing: the narrower holds. Pairs that are not here contradict each other.
_NARROWER: Final[dict[frozenset[Prefer], Prefer]] = {
    frozenset({"prefer_on_device", "only_on_device"}): "only_on_device",
    frozenset({"prefer_cloud", "only_cloud"}): "only_cloud",
}


def parse_chat(body: bytes, hints: RoutingHints, *, resumes: bool = False) -> Request:
    """The body of `POST /v1/chat/completions`. `wishes` came with the headers. Raises InvalidRequest.

    `resumes`: whoever answers can continue an answer that was cut short; else `causeway.continue` is refused.
    """
    try:
        document = load(body)
        return _may_resume(_chat(document, hints), resumes)
    except RecursionError:
        raise _too_deep() from None


def parse_completion(body: bytes, hints: RoutingHints, *, resumes: bool = False) -> Request:
    """The body of `POST /v1/completions`. Raises InvalidRequest."""
    try:
        document = load(body)
        return _may_resume(_completion(document, hints), resumes)
    except RecursionError:
        raise _too_deep() from None


def parse_embedding(body: bytes, hints: RoutingHints) -> Request:
    """The body of `POST /v1/embeddings`. Raises InvalidRequest."""
    try:
        document = load(body)
        return _may_resume(_embedding(document, hints), resumes=False)
    except RecursionError:
        raise _too_deep() from None


def _chat(document: JSONObject, hints: RoutingHints) -> Request:
    wire = shape(document, WireChat)
    refuse_legacy(wire)
    tools = tools_of(wire.tools) if wire.tools else ()
    return Request(
        kind="chat",
        model=wire.model,
        messages=messages_of(wire.messages),
        max_tokens=_token_limit(wire),
        limit_name="max_tokens" if wire.max_completion_tokens is None else "max_completion_tokens",
        sampling=_sampling(wire),
        stop=_stop(wire.stop),
        n=wire.n or 1,
        stream=wire.stream is True,
        include_usage=_include_usage(wire),
        tools=tools,
        # Without tools nothing can be called, and "none" is the same as nothing said.
        tool_choice=ToolChoice() if wire.tool_choice is None else choice_of(wire.tool_choice, tools),
        parallel_tool_calls=wire.parallel_tool_calls is not False,
        response_format=None if wire.response_format is None else format_of(wire.response_format),
        logprobs=_chat_logprobs(wire),
        user=wire.user,
        extra=_extra(document, _CHAT_FIELDS),
        hints=hints if wire.causeway is None else merge(hints, wire.causeway),
        resume="" if wire.causeway is None else wire.causeway.resume or "",
    )


def _completion(document: JSONObject, hints: RoutingHints) -> Request:
    wire = shape(document, WireCompletion)
    return Request(
        kind="completion",
        model=wire.model,
        prompts=_prompts(wire.prompt, "prompt", empty_text=True),
        max_tokens=wire.max_tokens,
        sampling=_sampling(wire),
        stop=_stop(wire.stop),
        n=wire.n or 1,
        stream=wire.stream is True,
        include_usage=_include_usage(wire),
        logprobs=wire.logprobs,
        echo=wire.echo is True,
        suffix=wire.suffix,
        user=wire.user,
        extra=_extra(document, _COMPLETION_FIELDS),
        hints=hints if wire.causeway is None else merge(hints, wire.causeway),
        resume="" if wire.causeway is None else wire.causeway.resume or "",
    )


def _embedding(document: JSONObject, hints: RoutingHints) -> Request:
    wire = shape(document, WireEmbedding)
    return Request(
        kind="embedding",
        model=wire.model,
        prompts=_prompts(wire.input, "input", empty_text=False),
        dimensions=wire.dimensions,
        encoding_format=wire.encoding_format or "float",
        user=wire.user,
        extra=_extra(document, _EMBEDDING_FIELDS),
        hints=hints if wire.causeway is None else merge(hints, wire.causeway),
        resume="" if wire.causeway is None else wire.causeway.resume or "",
    )


def merge(hints: RoutingHints, wire: WireRoutingHints) -> RoutingHints:
    """Both speak: tags add up, the shorter deadline and the narrower preference hold. Raises InvalidRequest if they
    contradict each other, for then one of the two would be widened."""
    deadlines = [ms for ms in (hints.deadline_ms, wire.deadline_ms) if ms is not None]
    return RoutingHints(
        prefer=_prefer(hints.prefer, wire.prefer),
        tags=tuple(sorted({*hints.tags, *(wire.tags or ())})),
        client=hints.client,
        deadline_ms=min(deadlines, default=None),
    )


def _prefer(header: Prefer | None, body: Prefer | None) -> Prefer | None:
    if header is None or body is None or header == body:
        return header or body
    narrower = _NARROWER.get(frozenset({header, body}))
    if narrower is None:
        raise InvalidRequest(
            f"`causeway.prefer` is {body}, but the request's header says {header}. Send one of them.",
            param="causeway.prefer",
        )
    return narrower


def _may_resume(request: Request, resumes: bool) -> Request:
    """Without the refusal the answer would begin anew, and whoever asked would not know."""
    if request.resume and not resumes:
        raise UnsupportedFeature(
            "`causeway.continue` is for the cloud gateway that cut the answer. Ask that one.", param="causeway.continue"
        )
    return request


def _token_limit(wire: WireChat) -> int | None:
    new, old = wire.max_completion_tokens, wire.max_tokens
    if new is not None and old is not None and new != old:
        raise InvalidRequest(
            "`max_tokens` and `max_completion_tokens` differ. Send one of them.", param="max_completion_tokens"
        )
    return old if new is None else new


def _sampling(wire: WireGeneration) -> Sampling:
    penalty, alias = wire.repeat_penalty, wire.repetition_penalty
    if penalty is not None and alias is not None and penalty != alias:
        raise InvalidRequest(
            "`repeat_penalty` and `repetition_penalty` differ. Send one of them.", param="repetition_penalty"
        )
    return Sampling(
        wire.temperature,
        wire.top_p,
        wire.top_k,
        wire.min_p,
        wire.presence_penalty,
        wire.frequency_penalty,
        alias if penalty is None else penalty,
        wire.seed,
        tuple(sorted(wire.logit_bias.items())) if wire.logit_bias else (),
    )


def _stop(wire: str | list[str] | None) -> tuple[str, ...]:
    if not wire:
        return ()
    return (wire,) if isinstance(wire, str) else tuple(wire)


def _include_usage(wire: WireGeneration) -> bool:
    return wire.stream_options is not None and wire.stream_options.include_usage is True


def _chat_logprobs(wire: WireChat) -> int | None:
    if wire.logprobs:
        return wire.top_logprobs or 0
    if wire.top_logprobs:
        raise InvalidRequest("`top_logprobs` needs `logprobs` to be true. Send both.", param="top_logprobs")
    return None


def _prompts(wire: str | list[str | int | list[int]], field: str, *, empty_text: bool) -> Prompts:
    """Text, several texts, token ids, or several lists of token ids; a list of ids is one prompt."""
    if isinstance(wire, str):
        wire = [wire]
    kinds = {type(item) for item in wire}
    if len(kinds) != 1:
        raise InvalidRequest(
            f"`{field}` mixes text and token ids. Send all of one kind.",
            param=field,
        )
    if kinds == {int}:
        return (tuple([item for item in wire if isinstance(item, int)]),)
    prompts: list[str | tuple[int, ...]] = []
    for at, item in enumerate(wire):
        if not item and not (item == "" and empty_text):
            param = f"{field}[{at}]" if len(wire) > 1 else field
            raise InvalidRequest(f"`{param}` is empty. Send some text or token ids.", param=param)
        prompts.append(item if isinstance(item, str) else tuple(item) if isinstance(item, list) else ())
    return tuple(prompts)


def _extra(document: JSONObject, known: frozenset[str]) -> str:
    """The fields that we do not interpret, as canonical JSON. One that looks like a wish of ours is refused: it would
    be carried to the target, and what the caller meant would not happen."""
    if document.keys() <= known:
        return ""
    unknown = {key: value for key, value in document.items() if key not in known}
    for key in unknown:
        if key.lower().replace("_", "-").startswith(("causeway", "x-causeway")):
            raise UnknownField(
                f"`{key[:64]}` is not a field that we know. Put wishes into the object `causeway`.", param=key[:64]
            )
    return canonical(unknown, sort=True)


def _too_deep() -> InvalidJSON:
    return InvalidJSON("The body is nested too deeply. Send fewer levels of arrays and objects.")
