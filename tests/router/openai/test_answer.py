"""Answers, whole and streamed, validated with the types of OpenAI's client."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import msgspec
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from causeway_server.router.errors import EngineCrashed, InvalidRequest, StreamBroken
from causeway_server.router.openai.answer import (
    AnswerEncoder,
    CachedAnswer,
    ModelObject,
    coalesce,
    encode_error,
    encode_model,
    encode_models,
    error_event,
)
from causeway_server.router.openai.upstream.decode import SSEParser, decode_answer
from causeway_server.router.types import Chunk, Request, TokenAlternative, TokenLogprob, ToolCallDelta, Usage

from .values import answers

CHAT = Request(kind="chat", model="auto")
TOKEN = TokenLogprob("hé", -0.5, (104, 195, 169), (TokenAlternative("ho", float("-inf")),))


def encoder(request: Request) -> AnswerEncoder:
    return AnswerEncoder(request, "chatcmpl-1", "small", 1_700_000_000)


def whole(request: Request, chunks: list[Chunk]) -> bytes:
    return encoder(request).whole(*coalesce(chunks))


def streamed(request: Request, chunks: list[Chunk]) -> list[bytes]:
    """Return the data of each event."""
    answer = encoder(request)
    sent = answer.start() + b"".join([answer.chunk(chunk) for chunk in chunks]) + answer.end()
    return [event.data for event in SSEParser().feed(sent)]


def with_(request: Request, **fields: object) -> Request:
    return msgspec.structs.replace(request, **fields)


def test_a_whole_chat_answer() -> None:
    chunks = [Chunk("Hel", tokens=1), Chunk("lo"), Chunk(finish_reason="stop"), Chunk(usage=Usage(3, 2, 1))]
    assert json.loads(whole(CHAT, chunks)) == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "small",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


def test_a_streamed_chat_answer() -> None:
    """The role first, then text and end; with include_usage the usage last and null before."""
    chunks = [Chunk("Hi", tokens=1), Chunk(finish_reason="stop"), Chunk(usage=Usage(3, 1))]
    *events, done = streamed(with_(CHAT, stream=True, include_usage=True), chunks)
    assert done == b"[DONE]"
    assert [event["choices"][:1] for event in map(json.loads, events)] == [
        [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "Hi"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}],
        [],
    ]
    assert [json.loads(event)["usage"] and json.loads(event)["usage"]["total_tokens"] for event in events] == [
        None,
        None,
        None,
        4,
    ]


def test_without_include_usage_no_event_has_usage() -> None:
    assert all(b"usage" not in event for event in streamed(CHAT, [Chunk("a", finish_reason="stop", usage=Usage(1, 1))]))


def test_without_reported_usage_streamed_tokens_are_counted() -> None:
    chunks = [Chunk("a", tokens=2), Chunk("b", tokens=1, finish_reason="stop")]
    event = json.loads(streamed(with_(CHAT, include_usage=True), chunks)[-2])
    assert event["usage"]["completion_tokens"] == 3
    assert json.loads(whole(CHAT, chunks))["usage"]["completion_tokens"] == 3


def test_tool_calls_stream_by_index_and_join_whole() -> None:
    chunks = [
        Chunk(tool_calls=(ToolCallDelta(0, '{"a"', "call_1", "lamp"),)),
        Chunk(tool_calls=(ToolCallDelta(0, ":1}"), ToolCallDelta(1, "{}", "call_2", "fan"))),
        Chunk(finish_reason="tool_calls"),
    ]
    deltas = [json.loads(event)["choices"][0]["delta"].get("tool_calls") for event in streamed(CHAT, chunks)[:-1]]
    assert deltas == [
        None,
        [{"index": 0, "function": {"arguments": '{"a"', "name": "lamp"}, "id": "call_1", "type": "function"}],
        [
            {"index": 0, "function": {"arguments": ":1}"}},
            {"index": 1, "function": {"arguments": "{}", "name": "fan"}, "id": "call_2", "type": "function"},
        ],
        None,
    ]
    message = json.loads(whole(CHAT, chunks))["choices"][0]["message"]
    assert message["content"] is None
    assert [(call["id"], call["function"]["arguments"]) for call in message["tool_calls"]] == [
        ("call_1", '{"a":1}'),
        ("call_2", "{}"),
    ]


def test_logprobs_of_chat() -> None:
    """An impossible token has OpenAI's lowest value, because JSON has no infinity."""
    chunks = [Chunk("hé", logprobs=(TOKEN,)), Chunk(finish_reason="stop")]
    expected = {
        "content": [
            {
                "token": "hé",
                "logprob": -0.5,
                "bytes": [104, 195, 169],
                "top_logprobs": [{"token": "ho", "logprob": -9999.0, "bytes": None}],
            }
        ],
        "refusal": None,
    }
    request = with_(CHAT, logprobs=1)
    assert json.loads(whole(request, chunks))["choices"][0]["logprobs"] == expected
    assert json.loads(streamed(request, chunks)[1])["choices"][0]["logprobs"] == expected


def test_logprobs_that_were_not_requested_are_not_sent() -> None:
    assert b'"logprobs":null' in whole(CHAT, [Chunk("hé", logprobs=(TOKEN,), finish_reason="stop")])


EURO = tuple("€".encode())
SPLIT = (TokenLogprob("\ufffd", -0.5, EURO[:1]), TokenLogprob("\ufffd", -0.5, EURO[1:]), TokenLogprob("!", -0.5, (33,)))


@pytest.mark.parametrize(
    "chunks",
    [
        [Chunk("a", logprobs=(TokenLogprob("a", -0.5, (97,)),)), Chunk("€!", logprobs=SPLIT, finish_reason="stop")],
        [
            Chunk("a", logprobs=(TokenLogprob("a", -0.5, (97,)), SPLIT[0])),
            Chunk("€!", logprobs=SPLIT[1:], finish_reason="stop"),
        ],
    ],
    ids=["whole characters", "a chunk ends in a character"],
)
def test_tokens_of_one_character_begin_where_it_does(chunks: list[Chunk]) -> None:
    """A token that is not UTF-8 is written as its bytes, and read back so. An echoed prompt has no tokens."""
    request = Request(kind="completion", model="m", prompts=("p",), logprobs=0, echo=True)
    chunks = [Chunk("echo "), *chunks]
    tokens = ["a", "bytes:\\xe2", "bytes:\\x82\\xac", "!"]
    body = whole(request, chunks)
    logprobs = json.loads(body)["choices"][0]["logprobs"]
    assert (logprobs["tokens"], logprobs["text_offset"]) == (tokens, [5, 6, 6, 7])
    assert logprobs["top_logprobs"] is None
    documents = [json.loads(data) for data in streamed(request, chunks) if data != b"[DONE]"]
    events = [choice["logprobs"] for document in documents for choice in document["choices"]]
    parts = [part for part in events if part]
    assert [offset for part in parts for offset in part["text_offset"]] == [5, 6, 6, 7]
    assert [token for part in parts for token in part["tokens"]] == tokens
    replay = CachedAnswer(request, "m", chunks).stream("id", 1)
    assert b'"text_offset":[5,6,6,7]' in replay
    read = [entry.bytes or tuple(entry.token.encode()) for chunk in decode_answer(body) for entry in chunk.logprobs]
    assert bytes(byte for entry in read for byte in entry).decode() == "a€!"


def test_offsets_of_completion_logprobs_continue_over_events() -> None:
    request = Request(kind="completion", model="m", prompts=("p",), logprobs=1)
    chunks = [Chunk("hé", logprobs=(TOKEN,)), Chunk("hé", logprobs=(TOKEN,), finish_reason="stop")]
    expected = {
        "tokens": ["hé", "hé"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"ho": -9999.0, "hé": -0.5}] * 2,
        "text_offset": [0, 2],
    }
    assert json.loads(whole(request, chunks))["choices"][0]["logprobs"] == expected
    offsets = [json.loads(event)["choices"][0]["logprobs"]["text_offset"] for event in streamed(request, chunks)[:-1]]
    assert offsets == [[0], [2]]


def test_a_chunk_without_content_is_no_event() -> None:
    answer = encoder(CHAT)
    assert answer.chunk(Chunk(tokens=1)) == b""
    assert answer.chunk(Chunk(usage=Usage(1, 1))) == b""


def test_an_unfinished_answer_is_never_encoded_as_finished() -> None:
    for chunks in ([Chunk("half")], [], [Chunk("a", finish_reason="stop"), Chunk("b", index=1)]):
        last = streamed(with_(CHAT, n=2), chunks)[-1]
        assert json.loads(last)["error"]["code"] == "stream_broken"
        with pytest.raises(StreamBroken):
            whole(CHAT, chunks)


def test_an_error_within_a_stream() -> None:
    (event,) = SSEParser().feed(error_event(EngineCrashed("The engine died.\nIt is back soon.")))
    assert json.loads(event.data) == {
        "error": {
            "message": "The engine died.\nIt is back soon.",
            "type": "backend_error",
            "param": None,
            "code": "engine_crashed",
        }
    }


def test_an_error_with_lone_surrogates_is_still_json() -> None:
    assert json.loads(encode_error(InvalidRequest("\ud800", param="\udc00")))["error"]["message"] == "?"


def test_models() -> None:
    page = json.loads(encode_models([ModelObject("auto", "causeway", 1), ModelObject("small", "edge", 2)]))
    assert [Model.model_validate(item, strict=True).id for item in page["data"]] == ["auto", "small"]
    assert Model.model_validate_json(encode_model(ModelObject("auto", "causeway", 1))).owned_by == "causeway"


@pytest.mark.slow
@given(st.data(), st.integers(1, 3), st.none() | st.integers(0, 2), st.booleans())
def test_official_types_validate_every_chat_answer(data, n, logprobs, include_usage) -> None:  # type: ignore[no-untyped-def]
    """Whole and streamed have equal content."""
    request = with_(CHAT, n=n, logprobs=logprobs, include_usage=include_usage)
    chunks = data.draw(answers(n))
    answer = ChatCompletion.model_validate_json(whole(request, chunks), strict=True)
    *events, done = streamed(request, chunks)
    assert done == b"[DONE]"
    read = [ChatCompletionChunk.model_validate_json(event, strict=True) for event in events]
    assert {chunk.id for chunk in read} == {answer.id}
    for choice in answer.choices:
        pieces = [piece for chunk in read for piece in chunk.choices if piece.index == choice.index]
        assert pieces[0].delta.role == "assistant"
        assert "".join([piece.delta.content or "" for piece in pieces]) == (choice.message.content or "")
        assert [piece.finish_reason for piece in pieces if piece.finish_reason] == [choice.finish_reason]
        tokens = [token for piece in pieces if piece.logprobs for token in piece.logprobs.content or []]
        assert tokens == ((choice.logprobs and choice.logprobs.content) or [])
        calls = choice.message.tool_calls or []
        for index, call in enumerate(calls):
            deltas = [d for piece in pieces for d in piece.delta.tool_calls or [] if d.index == index]
            assert call.type == "function"
            functions = [delta.function for delta in deltas if delta.function is not None]
            assert len(functions) == len(deltas)
            assert (deltas[0].id, functions[0].name) == (call.id, call.function.name)
            assert "".join([function.arguments or "" for function in functions]) == call.function.arguments
    if include_usage:
        assert read[-1].usage == answer.usage


@pytest.mark.slow
@given(st.data(), st.integers(1, 2), st.none() | st.integers(0, 2))
@settings(max_examples=80)
def test_official_types_validate_every_completion(data, n, logprobs) -> None:  # type: ignore[no-untyped-def]
    """The official type has no null finish_reason, although OpenAI streams one."""
    request = Request(kind="completion", model="m", prompts=("a", "b"), n=n, logprobs=logprobs)
    chunks = data.draw(answers(2 * n, tool_calls=False))
    answer = Completion.model_validate_json(whole(request, chunks), strict=True)
    events = [json.loads(event) for event in streamed(request, chunks)[:-1]]
    for event in events:
        for choice in event["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        Completion.model_validate(event, strict=True)
    for choice in answer.choices:
        pieces = [piece for event in events for piece in event["choices"] if piece["index"] == choice.index]
        assert "".join([piece["text"] for piece in pieces]) == choice.text


def official_client(body: bytes, content_type: str) -> openai.OpenAI:
    def answer(_: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, content=body, headers={"content-type": content_type})

    transport = httpx2.MockTransport(answer)
    return openai.OpenAI(api_key="k", base_url="http://edge/v1", http_client=httpx2.Client(transport=transport))


def stream_of(sent: bytes) -> openai.Stream[ChatCompletionChunk]:
    completions = official_client(sent, "text/event-stream").chat.completions
    return completions.create(model="auto", messages=[{"role": "user", "content": "x"}], stream=True)


def test_the_official_client_reads_a_stream_and_its_error() -> None:
    answer = encoder(CHAT)
    sent = answer.start() + answer.chunk(Chunk("Hi")) + answer.chunk(Chunk(finish_reason="stop")) + answer.end()
    stream = stream_of(sent)
    assert "".join([chunk.choices[0].delta.content or "" for chunk in stream]) == "Hi"
    broken = encoder(CHAT).start() + error_event(EngineCrashed("gone"))
    stream = stream_of(broken)
    with pytest.raises(openai.APIError, match="gone") as caught:
        list(stream)
    assert caught.value.code == "engine_crashed"


def _events(stream: bytes) -> list[dict[str, Any]]:
    return [json.loads(event.data) for event in SSEParser().feed(stream) if event.data != b"[DONE]"]


def test_thoughts_are_a_field_of_their_own() -> None:
    """With their tokens in the usage, whole and streamed."""
    chunks = [Chunk(reasoning="2 + ", tokens=2), Chunk(reasoning="2"), Chunk("Four."), Chunk(finish_reason="stop")]
    chunks.append(Chunk(usage=Usage(3, 6, 0, 4)))
    answer = json.loads(whole(CHAT, chunks))
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Four.", "2 + 2")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}
    *events, _ = streamed(with_(CHAT, stream=True, include_usage=True), chunks)
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events[1:-1]]
    assert deltas == [{"reasoning_content": "2 + "}, {"reasoning_content": "2"}, {"content": "Four."}, {}]
    assert json.loads(events[-1])["usage"] == answer["usage"]
    assert json.loads(whole(CHAT, chunks[:1] + chunks[3:]))["choices"][0]["message"]["content"] == ""


@pytest.mark.parametrize("request_", [CHAT, Request(kind="completion", model="auto", prompts=("a",))])
def test_a_text_alone_is_sent_as_one_that_comes_first(request_: Request) -> None:
    """The event around such a text is made once for each choice; a choice that has ended begins again."""
    request = with_(request_, n=2, stream=True)
    said = [Chunk("é", 0, 1), Chunk('"', 1, 1), Chunk("é", 0, 1), Chunk('"', 1, 1)]
    ended = [Chunk(" end", 0, 1, finish_reason="stop"), Chunk("", 1, 0, finish_reason="length")]
    answer = encoder(request)
    answer.start()
    first, second, third, fourth = [answer.chunk(chunk) for chunk in said]
    assert (third, fourth) == (first, second)
    assert json.loads(first.removeprefix(b"data: "))["choices"][0]["index"] == 0
    assert json.loads(fourth.removeprefix(b"data: "))["choices"][0]["index"] == 1
    assert [
        json.loads(answer.chunk(chunk).removeprefix(b"data: "))["choices"][0]["finish_reason"] for chunk in ended
    ] == ["stop", "length"]
    assert answer.finished


def test_usage_in_the_event_of_a_text_is_kept() -> None:
    answer = encoder(with_(CHAT, stream=True, include_usage=True))
    sent = [answer.chunk(Chunk("a", 0, 1)), answer.chunk(Chunk("b", 0, 1, usage=Usage(3, 2, 1)))]
    sent += [answer.chunk(Chunk(finish_reason="stop"))]
    assert sent[1] == sent[0].replace(b'"a"', b'"b"')
    assert b'"prompt_tokens":3' in answer.end()
