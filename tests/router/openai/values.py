"""Hypothesis strategies: any valid value of the vocabulary, for tests of the OpenAI dialect."""

from __future__ import annotations

import msgspec
from hypothesis import strategies as st

from causeway_server.router.types import (
    AudioPart,
    Chunk,
    FilePart,
    FinishReason,
    ImagePart,
    Message,
    Request,
    ResponseFormat,
    RoutingHints,
    Sampling,
    TextPart,
    TokenAlternative,
    TokenLogprob,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolChoice,
    Usage,
)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
names = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


def _canonical(value: object) -> str:
    return msgspec.json.encode(value).decode()


schemas = st.sampled_from(
    [
        {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "number"}}, "required": ["b"]},
        {"type": "object", "properties": {"t": {"$ref": "#/$defs/T"}}, "$defs": {"T": {"enum": ["on", "off"]}}},
    ]
).map(_canonical)

parts = st.one_of(
    st.builds(TextPart, texts),
    st.builds(ImagePart, texts, st.sampled_from(["auto", "low", "high"])),
    st.builds(AudioPart, texts, st.sampled_from(["wav", "mp3"])),
    st.builds(FilePart, st.just('{"file_id":"f-1"}')),
)
contents = texts | st.lists(parts, min_size=1, max_size=3).map(tuple)
messages = st.one_of(
    st.builds(Message, st.sampled_from(["system", "developer", "user"]), contents, st.none() | names),
    st.builds(
        Message,
        st.just("assistant"),
        st.none() | contents,
        st.none(),
        st.lists(st.builds(ToolCall, names, names, texts), max_size=2).map(tuple),
    ),
    st.builds(Message, st.just("tool"), texts, tool_call_id=names),
    st.builds(Message, st.just("function"), texts, names),
)
samplings = st.builds(
    Sampling,
    st.none() | st.floats(0, 2),
    st.none() | st.floats(0, 1),
    st.none() | st.integers(-1, 100),
    st.none() | st.floats(0, 1),
    st.none() | st.floats(-2, 2),
    st.none() | st.floats(-2, 2),
    st.none() | st.floats(0.1, 2),
    st.none() | st.integers(-(2**63), 2**63 - 1),
    st.dictionaries(st.integers(0, 99999), st.floats(-100, 100), max_size=3).map(lambda b: tuple(sorted(b.items()))),
)
tools = st.lists(
    st.builds(Tool, names, texts, schemas | st.just("{}"), st.booleans()), max_size=3, unique_by=lambda tool: tool.name
).map(tuple)
formats = st.none() | st.one_of(
    st.builds(ResponseFormat, st.sampled_from(["text", "json_object"])),
    st.builds(ResponseFormat, st.just("json_schema"), names, schemas, st.booleans(), texts),
)
extras = st.just("") | st.dictionaries(
    st.sampled_from(["metadata", "verbosity", "zeta", "alpha"]), json_values, min_size=1, max_size=3
).map(lambda extra: msgspec.json.encode(extra, order="sorted").decode())
hints = st.builds(
    RoutingHints,
    st.none() | st.sampled_from(["prefer_on_device", "only_on_device", "prefer_cloud", "only_cloud"]),
    st.lists(names, max_size=2, unique=True).map(lambda tags: tuple(sorted(tags))),
    names,
    st.none() | st.integers(1, 10**6),
)
stops = st.lists(texts.filter(bool), max_size=3).map(tuple)


@st.composite
def chat_requests(draw: st.DrawFn) -> Request:
    wanted = draw(tools)
    choices = [ToolChoice()]
    if wanted:
        choices += [ToolChoice("none"), ToolChoice("required"), ToolChoice("function", wanted[0].name)]
    stream = draw(st.booleans())
    return Request(
        kind="chat",
        model=draw(names),
        messages=tuple(draw(st.lists(messages, min_size=1, max_size=3))),
        max_tokens=draw(st.none() | st.integers(1, 4096)),
        sampling=draw(samplings),
        stop=draw(stops),
        n=draw(st.integers(1, 16)),
        stream=stream,
        include_usage=stream,
        tools=wanted,
        tool_choice=draw(st.sampled_from(choices)),
        parallel_tool_calls=draw(st.booleans()) if wanted else True,
        response_format=draw(formats),
        logprobs=draw(st.none() | st.integers(0, 20)),
        reasoning_effort=draw(st.sampled_from([None, "none", "high"])),
        user=draw(st.none() | texts),
        extra=draw(extras),
        hints=draw(hints),
    )


prompts = st.one_of(
    texts.map(lambda text: (text,)),
    st.lists(texts, min_size=2, max_size=3).map(tuple),
    st.lists(st.lists(st.integers(0, 9999), min_size=1, max_size=4).map(tuple), min_size=1, max_size=3).map(tuple),
)


@st.composite
def completion_requests(draw: st.DrawFn) -> Request:
    stream = draw(st.booleans())
    return Request(
        kind="completion",
        model=draw(names),
        prompts=draw(prompts),
        max_tokens=draw(st.none() | st.integers(1, 4096)),
        sampling=draw(samplings),
        stop=draw(stops),
        n=draw(st.integers(1, 4)),
        stream=stream,
        include_usage=stream,
        logprobs=draw(st.none() | st.integers(0, 20)),
        echo=draw(st.booleans()),
        suffix=draw(st.none() | texts.filter(bool)),
        user=draw(st.none() | texts),
        extra=draw(extras),
        hints=draw(hints),
    )


logprob_values = st.floats(-50, 0) | st.just(float("-inf"))
token_bytes = st.none() | st.lists(st.integers(0, 255), max_size=3).map(tuple)
token_logprobs = st.builds(
    TokenLogprob,
    texts,
    logprob_values,
    token_bytes,
    st.lists(st.builds(TokenAlternative, texts, logprob_values, token_bytes), max_size=2).map(tuple),
)


@st.composite
def answers(draw: st.DrawFn, choices: int, *, tool_calls: bool = True) -> list[Chunk]:
    """Draw a finished answer of `choices` choices: chunks interleaved in any order, the usage last."""
    streams = [_choice(draw, index, tool_calls) for index in range(choices)]
    chunks: list[Chunk] = []
    while any(streams):
        stream = draw(st.sampled_from([stream for stream in streams if stream]))
        chunks.append(stream.pop(0))
    if draw(st.booleans()):
        chunks.append(Chunk(usage=draw(st.builds(Usage, *[st.integers(0, 999)] * 3))))
    return chunks


def _choice(draw: st.DrawFn, index: int, tool_calls: bool) -> list[Chunk]:
    pieces = draw(st.lists(st.tuples(texts, st.lists(token_logprobs, max_size=2).map(tuple)), max_size=3))
    chunks = [Chunk(text, index, tokens=len(logprobs), logprobs=logprobs) for text, logprobs in pieces]
    called = tool_calls and draw(st.booleans())
    for call in range(draw(st.integers(1, 2)) if called else 0):
        first = ToolCallDelta(call, draw(texts), f"call_{index}_{call}", draw(names))
        chunks.append(Chunk(index=index, tokens=1, tool_calls=(first,)))
        chunks.append(Chunk(index=index, tokens=1, tool_calls=(ToolCallDelta(call, draw(texts)),)))
    if tool_calls and draw(st.booleans()):
        chunks.append(Chunk(index=index, refusal=draw(texts)))
    other_reasons: list[FinishReason] = ["stop", "length", "content_filter"]
    reason: FinishReason = "tool_calls" if called else draw(st.sampled_from(other_reasons))
    return [*chunks, Chunk(index=index, finish_reason=reason)]
