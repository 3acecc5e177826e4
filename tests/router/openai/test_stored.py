"""Cached answers: stored, read back, and delivered again."""

from __future__ import annotations

import contextlib
import json
import typing

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from causeway_server.router.errors import StreamBroken
from causeway_server.router.openai.answer import (
    VERSION,
    AnswerEncoder,
    CachedAnswer,
    StoredChunk,
    coalesce,
    decode_chunks,
    encode_chunks,
)
from causeway_server.router.openai.upstream.decode import SSEParser
from causeway_server.router.types import Chunk, Confidence, Request, TokenLogprob, Usage

from .values import answers

CHAT = Request(kind="chat", model="auto")
CHUNKS = [Chunk("Hel", tokens=1), Chunk("lo", tokens=1), Chunk(finish_reason="stop"), Chunk(usage=Usage(3, 2))]


@pytest.mark.slow
@given(st.data(), st.integers(1, 3))
@settings(max_examples=80)
def test_storing_loses_nothing(data, n) -> None:  # type: ignore[no-untyped-def]
    chunks = [*data.draw(answers(n)), Chunk("x", confidence=Confidence(1, 0.5, -0.1, 0.2, 0.3))]
    assert decode_chunks(encode_chunks(chunks)) == tuple(chunks)


@given(st.binary(max_size=80))
def test_bad_bytes_are_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="stored chunks"):
        decode_chunks(data)


@given(st.data())
@settings(max_examples=80)
def test_damaged_bytes_are_chunks_or_a_value_error(data: st.DataObject) -> None:
    stored = bytearray(encode_chunks(CHUNKS))
    at = data.draw(st.integers(0, len(stored) - 1))
    if data.draw(st.booleans()):
        stored[at] = data.draw(st.integers(0, 255))
    else:
        del stored[at:]
    with contextlib.suppress(ValueError):
        assert all(isinstance(chunk, Chunk) for chunk in decode_chunks(bytes(stored)))


def test_another_version_is_refused() -> None:
    other = msgspec.msgpack.encode([VERSION + 1, []])
    with pytest.raises(ValueError, match=f"version {VERSION + 1}"):
        decode_chunks(other)


def test_a_stored_chunk_has_the_fields_of_a_chunk() -> None:
    """A change of Chunk needs the same change here, and another version."""
    assert StoredChunk.__struct_fields__ == Chunk.__struct_fields__
    assert typing.get_type_hints(StoredChunk) == typing.get_type_hints(Chunk)
    assert (VERSION, Chunk.__struct_fields__, TokenLogprob.__struct_fields__, Usage.__struct_fields__) == (
        6,
        (
            "text",
            "index",
            "tokens",
            "tool_calls",
            "logprobs",
            "finish_reason",
            "confidence",
            "usage",
            "refusal",
            "reasoning",
            "extra",
            "note",
            "stop",
        ),
        ("token", "logprob", "bytes", "top"),
        ("prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens", "audio_ms"),
    )


@pytest.mark.slow
@given(st.data(), st.integers(1, 2), st.none() | st.just(1))
@settings(max_examples=80)
def test_a_cached_answer_is_the_encoded_answer(data, n, logprobs) -> None:  # type: ignore[no-untyped-def]
    request = msgspec.structs.replace(CHAT, n=n, logprobs=logprobs)
    chunks = data.draw(answers(n))
    kept = CachedAnswer(request, "small", chunks)
    assert kept.whole("chatcmpl-9", 77) == AnswerEncoder(request, "chatcmpl-9", "small", 77).whole(*coalesce(chunks))
    answer = ChatCompletion.model_validate_json(kept.whole('id"\n', 77), strict=True)
    assert (answer.id, answer.created) == ('id"\n', 77)


@pytest.mark.slow
@given(st.data(), st.integers(1, 2), st.booleans())
@settings(max_examples=80)
def test_a_cached_answer_streams(data, n, include_usage) -> None:  # type: ignore[no-untyped-def]
    chunks = data.draw(answers(n))
    kept = CachedAnswer(msgspec.structs.replace(CHAT, n=n), "small", chunks)
    *events, done = [event.data for event in SSEParser().feed(kept.stream("x", 5, include_usage=include_usage))]
    assert done == b"[DONE]"
    read = [ChatCompletionChunk.model_validate_json(event, strict=True) for event in events]
    assert {(chunk.id, chunk.created, chunk.model) for chunk in read} == {("x", 5, "small")}
    for choice in ChatCompletion.model_validate_json(kept.whole("x", 5)).choices:
        pieces = [piece for chunk in read for piece in chunk.choices if piece.index == choice.index]
        assert pieces[0].delta.role == "assistant"
        assert "".join([piece.delta.content or "" for piece in pieces]) == (choice.message.content or "")
        assert pieces[-1].finish_reason == choice.finish_reason
    assert all(("usage" in json.loads(event)) is include_usage for event in events)
    if include_usage:
        assert read[-1].usage is not None
        assert read[-1].choices == []


def test_each_hit_has_its_own_identity() -> None:
    kept = CachedAnswer(CHAT, "small", CHUNKS)
    assert json.loads(kept.whole("a", 1))["id"] == "a"
    assert json.loads(kept.whole("b", 2))["id"] == "b"
    assert b'"id":"a"' not in kept.stream("b", 2)


def test_a_legacy_completion_streams_again() -> None:
    kept = CachedAnswer(Request(kind="completion", model="m", prompts=("p",)), "m", CHUNKS)
    events = [event.data for event in SSEParser().feed(kept.stream("x", 5))]
    assert [json.loads(event)["choices"][0]["text"] for event in events[:-1]] == ["Hello", ""]


@pytest.mark.parametrize("chunks", [[], [Chunk("half")], [Chunk(usage=Usage(1, 1))]])
def test_an_unfinished_answer_cannot_be_cached(chunks: list[Chunk]) -> None:
    with pytest.raises(StreamBroken):
        CachedAnswer(CHAT, "small", chunks)


@pytest.mark.slow
@given(st.data(), st.integers(1, 3))
@settings(max_examples=60)
def test_coalescing_twice_changes_nothing(data, n) -> None:  # type: ignore[no-untyped-def]
    choices, usage = coalesce(data.draw(answers(n)))
    assert coalesce([*choices, Chunk(usage=usage)]) == (choices, usage)
    assert [choice.index for choice in choices] == list(range(n))
