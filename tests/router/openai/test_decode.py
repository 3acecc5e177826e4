"""Answers of OpenAI-compatible servers, in their dialects, and what is refused."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from causeway_server.router.errors import BackendError, CloudFailed, ContextLengthExceeded, InvalidRequest, StreamBroken
from causeway_server.router.openai.answer import AnswerEncoder, coalesce
from causeway_server.router.openai.upstream.decode import SSEParser, StreamDecoder, decode_answer
from causeway_server.router.serving.upstream.responses import status_error
from causeway_server.router.types import Chunk, Request, TokenAlternative, TokenLogprob, ToolCallDelta, Usage

from .values import answers, json_values


def event(*choices: object, **fields: object) -> bytes:
    return json.dumps({"id": "x", "object": "chat.completion.chunk", "choices": list(choices), **fields}).encode()


def piece(delta: object, finish_reason: object = None, index: int = 0) -> dict[str, object]:
    return {"index": index, "delta": delta, "finish_reason": finish_reason}


def read(*events: bytes) -> list[Chunk]:
    decoder = StreamDecoder()
    chunks = [chunk for data in events for chunk in decoder.feed(data)]
    return chunks + decoder.finish()


def texts_of(decoder: StreamDecoder, data: bytes) -> tuple[list[bytes], int]:
    """Return the texts of events that are text alone, as JSON, and the index of their choice."""
    template = decoder.text_template
    return ([], 0) if template is None else (template.texts(data), template.index)


def test_an_event_that_calls_the_request_bad_is_the_clients_error() -> None:
    """As vLLM answers a schema that its grammar does not know. After the first piece the server broke."""
    refusal = json.dumps({"error": {"message": "Grammar error", "type": "BadRequestError", "code": 400}}).encode()
    with pytest.raises(InvalidRequest, match="Grammar error"):
        read(refusal)
    with pytest.raises(CloudFailed, match="Grammar error"):
        read(event(piece({"content": "a"})), refusal)


def test_a_prompt_that_is_too_long_is_known_by_the_message_that_names_no_code() -> None:
    message = "This model's maximum context length is 2048 tokens. However, your prompt contains 2049."
    found = status_error(400, "", json.dumps({"error": {"message": message, "code": 400}}).encode(), "m")
    assert isinstance(found, ContextLengthExceeded)


def test_a_stream_of_openai() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    assert read(
        event(piece({"role": "assistant", "content": "", "refusal": None}), usage=None),
        event(piece({"content": "Hi"}), usage=None),
        event(piece({}, "stop"), usage=None),
        event(usage=usage),
        b"[DONE]",
    ) == [Chunk("Hi", tokens=1), Chunk(finish_reason="stop"), Chunk(usage=Usage(5, 2, 4))]


def test_a_stream_of_vllm() -> None:
    """Usage on every chunk is reported once, at the end; null content is dropped; thoughts are kept apart."""
    usage = {"prompt_tokens": 5, "total_tokens": 6, "completion_tokens": 1, "prompt_tokens_details": None}
    assert read(
        event(piece({"role": "assistant", "content": None}), usage={**usage, "completion_tokens": 0}),
        event(piece({"reasoning_content": "hmm", "content": None}), usage=usage),
        event({**piece({"content": "Hi"}, "length"), "stop_reason": None, "token_ids": None}, usage=usage),
        b"[DONE]",
    ) == [
        Chunk(tokens=1, reasoning="hmm"),
        Chunk("Hi", tokens=1),
        Chunk(finish_reason="length"),
        Chunk(usage=Usage(5, 1)),
    ]
    assert read(event(piece({"reasoning": "hmm"})), event(piece({}, "stop")), b"[DONE]")[0].reasoning == "hmm"


def test_thoughts_of_a_whole_answer_and_their_tokens() -> None:
    message = {"role": "assistant", "content": "Four.", "reasoning_content": "2 + 2"}
    usage = {"prompt_tokens": 5, "completion_tokens": 9, "completion_tokens_details": {"reasoning_tokens": 6}}
    body = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage}
    answer, end = decode_answer(json.dumps(body).encode())
    assert (answer.text, answer.reasoning) == ("Four.", "2 + 2")
    assert end.usage == Usage(5, 9, 0, 6)


TEXTS = st.text() | st.sampled_from(["a", '"', "\\", "content", '"content":"', "\u2028", "é", "😀"])


@given(
    texts=st.lists(TEXTS, min_size=1, max_size=12),
    ascii_only=st.booleans(),
    spaced=st.booleans(),
    varying=st.booleans(),
    completion=st.booleans(),
)
def test_events_that_differ_in_their_text_alone_decode_as_each_would_by_itself(
    texts: list[str], ascii_only: bool, spaced: bool, varying: bool, completion: bool
) -> None:
    """Also where a server escapes in its own way, or where a field varies."""
    decoder = StreamDecoder()
    for number, text in enumerate(texts):
        choice = {"index": 0, "text": text} if completion else {"index": 0, "delta": {"content": text}}
        data = json.dumps(
            {"id": '"content":""', "choices": [choice | {"finish_reason": None}], "created": number if varying else 7},
            ensure_ascii=ascii_only,
            separators=None if spaced else (",", ":"),
        ).encode()
        alone = StreamDecoder().feed(data)
        framed = b"data: " + data + b"\n\n"
        assert decoder.feed_text(framed) in (None, *alone)
        assert decoder.feed_text(framed + framed) is None
        assert decoder.feed_text(framed[:-1]) is None
        for times in (1, 3):
            found, index = texts_of(decoder, framed * times)
            assert [json.loads(literal) for literal in found] in ([], [text] * times)
            assert index == 0
        assert texts_of(decoder, framed[:-1])[0] == texts_of(decoder, framed + framed[:-1])[0] == []
        assert decoder.feed(data) == alone


@pytest.mark.parametrize(
    "data",
    [
        event(piece({"content": "b"}, "stop")),
        event(piece({"content": "b"}, index=1)),
        event(piece({"content": "b"}), usage={"prompt_tokens": 1, "completion_tokens": 2}),
        event(piece({"content": ""})),
        event(piece({"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{}"}}]})),
        event(piece({"content": "b", "content_2": "c"})),
        event(piece({"content": None, "refusal": "no"})),
    ],
)
def test_an_event_that_differs_in_more_than_its_text_is_decoded(data: bytes) -> None:
    decoder = StreamDecoder()
    decoder.feed(event(piece({"content": "a"})))
    framed, text = b"data: " + data + b"\n\n", b"data: " + event(piece({"content": "a"})) + b"\n\n"
    assert decoder.feed_text(framed) is None
    assert texts_of(decoder, framed)[0] == texts_of(decoder, text + framed + text)[0] == []
    assert decoder.feed(data) == StreamDecoder().feed(data)


def test_text_alone_is_read_as_it_is_sent_once_one_such_event_was_decoded() -> None:
    decoder = StreamDecoder()
    wire = b"data: " + event(piece({"content": "b"})) + b"\n\n"
    assert decoder.feed_text(wire) is None
    decoder.feed(event(piece({"content": "a"})))
    assert decoder.feed_text(wire) == Chunk("b", tokens=1)
    with pytest.raises(StreamBroken):
        decoder.finish()


@pytest.mark.parametrize(
    "literal",
    [
        b'"\xff"',
        b'"\\ud800"',
        b'"\\x"',
        b'"a\nb"',
        b'"a\x00b"',
        b'"a""b"',
        b'""',
        b"1",
        b"null",
        b'"a"\n',
        b'\n"a"',
        b'\r"a"',
        b'"a"\n\n',
    ],
)
def test_a_text_that_is_not_json_is_not_passed_on(literal: bytes) -> None:
    decoder = StreamDecoder()
    good = b"data: " + event(piece({"content": "a"})) + b"\n\n"
    decoder.feed(event(piece({"content": "a"})))
    assert texts_of(decoder, good + good) == ([b'"a"', b'"a"'], 0)
    bad = good.replace(b'"a"', literal)
    assert texts_of(decoder, good + bad)[0] == texts_of(decoder, bad)[0] == []


def test_text_after_the_end_of_a_choice_reopens_it() -> None:
    """As for events that are decoded one by one: such a stream has no end."""
    text = event(piece({"content": "a"}))
    with pytest.raises(StreamBroken):
        read(text, event(piece({}, "stop")), text)


@pytest.mark.parametrize(
    "data", [event(piece({"content": "a"}))[:-1], event(piece({"content": "a"})).replace(b'"a"', b'"\xff"')]
)
def test_a_malformed_event_is_refused_after_good_ones(data: bytes) -> None:
    decoder = StreamDecoder()
    for text in "ab":
        decoder.feed(event(piece({"content": text})))
    with pytest.raises(CloudFailed):
        decoder.feed(data)


def test_a_stream_without_done() -> None:
    """A server may close after the end of every choice, or send only [DONE]."""
    assert read(event(piece({"content": "a"}, "eos_token"))) == [Chunk("a", tokens=1), Chunk(finish_reason="stop")]
    assert read(event(piece({"content": "a"})), b" [DONE]") == [Chunk("a", tokens=1), Chunk(finish_reason="stop")]


def test_tool_calls_with_missing_parts() -> None:
    """Calls without an index count by position, without an id get one that no other request's calls have."""
    chunks = read(
        event(piece({"tool_calls": [{"function": {"name": "a", "arguments": "{}"}}, {"function": {"name": "b"}}]})),
        event(
            piece({"tool_calls": [{"index": 1, "id": "", "function": {"name": None, "arguments": "{}"}}]}, "tool_calls")
        ),
        b"[DONE]",
    )
    first, second = (call.id for call in chunks[0].tool_calls)
    assert first != second
    assert chunks == [
        Chunk(tokens=1, tool_calls=(ToolCallDelta(0, "{}", first, "a"), ToolCallDelta(1, "", second, "b"))),
        Chunk(tokens=1, tool_calls=(ToolCallDelta(1, "{}"),)),
        Chunk(finish_reason="tool_calls"),
    ]


def test_bytes_after_done_are_ignored() -> None:
    assert read(event(piece({"content": "a"}, "stop")), b"[DONE]", b"garbage") == [
        Chunk("a", tokens=1),
        Chunk(finish_reason="stop"),
    ]


@pytest.mark.parametrize(
    "events",
    [
        [],
        [event()],
        [event(piece({"content": "a"}))],
        [event(piece({"content": "a"}, "stop"), piece({"content": "b"}, None, 1))],
    ],
)
def test_a_stream_that_stops_before_its_end(events: list[bytes]) -> None:
    with pytest.raises(StreamBroken):
        read(*events)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"error":{"message":"out of memory","code":500}}', "out of memory"),
        (b'{"error":"overloaded"}', "overloaded"),
        (b'{"error":{"code":"boom"}}', "boom"),
        (b'{"object":"error","message":"bad things","code":500}', "bad things"),
        (b"{}x", "malformed"),
        (b"[]", "malformed"),
        (b"\xff", "malformed"),
        (b'{"choices":[{"delta":{"content":5}}]}', "malformed"),
        (b'{"choices":"x"}', "malformed"),
        (b'{"choices":[{"delta":{"content":"\\ud800"}}]}', "malformed"),
        (b'{"error":' + b"[" * 100_000, "malformed"),
        (event(piece({}, "abort")), "abort"),
    ],
)
def test_errors_in_a_stream(data: bytes, message: str) -> None:
    with pytest.raises(CloudFailed, match=message) as caught:
        StreamDecoder().feed(data)
    assert caught.value.phase == "first_token"
    decoder = StreamDecoder()
    decoder.feed(event(piece({"content": "a"})))
    with pytest.raises(CloudFailed) as caught:
        decoder.feed(data)
    assert caught.value.phase == "stream"


def test_done_without_an_answer() -> None:
    with pytest.raises(CloudFailed):
        StreamDecoder().feed(b"[DONE]")


def test_a_whole_answer() -> None:
    body = {
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Hi",
                    "refusal": None,
                    "tool_calls": None,
                    "annotations": [],
                    "audio": None,
                },
                "logprobs": {
                    "content": [
                        {
                            "token": "Hi",
                            "logprob": -0.1,
                            "bytes": [72],
                            "top_logprobs": [{"token": "Ho", "logprob": -2, "bytes": None}],
                        }
                    ]
                },
                "finish_reason": "stop",
            },
            {
                "index": 1,
                "message": {
                    "content": None,
                    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
                },
                "finish_reason": None,
            },
        ],
        "usage": {"prompt_tokens": 1, "completion_tokens": 2},
    }
    assert decode_answer(json.dumps(body).encode()) == [
        Chunk(
            "Hi",
            tokens=1,
            finish_reason="stop",
            logprobs=(TokenLogprob("Hi", -0.1, (72,), (TokenAlternative("Ho", -2.0),)),),
            extra='{"annotations":[]}',
        ),
        Chunk(index=1, tool_calls=(ToolCallDelta(0, "{}", "c", "f"),), finish_reason="tool_calls"),
        Chunk(usage=Usage(1, 2)),
    ]


_ODD = st.sampled_from([None, "", "x", 0, 1, -1, 1.0, True, [], {}, ["x"], {"x": 1}, "error"])


def _fields(required: dict[str, st.SearchStrategy[object]], *odd: str) -> st.SearchStrategy[dict[str, object]]:
    """Return objects whose fields are usual ones or odd ones, and may be missing."""
    usual = {name: st.one_of(value, value, value, _ODD) for name, value in required.items()}
    return st.fixed_dictionaries({}, optional=usual | dict.fromkeys(odd, _ODD))


_WHOLE_MESSAGE = _fields(
    {"role": st.just("assistant"), "content": st.text(), "refusal": st.none(), "tool_calls": st.just([])},
    *("reasoning_content", "reasoning", "function_call", "annotations", "audio", "more"),
)
_WHOLE_CHOICE = _fields(
    {
        "index": st.integers(0, 3),
        "message": _WHOLE_MESSAGE,
        "finish_reason": st.sampled_from(["stop", "length", "EOS", "odd", "abort", "tool_calls"]),
        "logprobs": st.none(),
    },
    *("delta", "text", "more"),
)
_WHOLE_USAGE = _fields(
    {
        "prompt_tokens": st.integers(0, 9),
        "completion_tokens": st.integers(0, 9),
        "prompt_tokens_details": _fields({"cached_tokens": st.integers(0, 9)}),
    }
)


@given(
    _fields(
        {"choices": st.lists(_WHOLE_CHOICE, max_size=2), "usage": _WHOLE_USAGE, "object": st.just("chat.completion")},
        *("error", "causeway", "more"),
    )
)
def test_the_usual_form_of_an_answer_is_read_as_any_other(answer: dict[str, object]) -> None:
    """A byte order mark keeps an answer from being read as one of the usual form."""
    body = json.dumps(answer).encode()
    results: list[object] = []
    for sent in (body, b"\xef\xbb\xbf" + body):
        try:
            results.append(decode_answer(sent, "id"))
        except CloudFailed as error:
            results.append((type(error), error.message))
    assert results[0] == results[1]


def test_a_whole_completion() -> None:
    """The first token of an echo has no logprob."""
    body = {
        "choices": [
            {
                "index": 0,
                "text": "ab",
                "logprobs": {"tokens": ["a", "b"], "token_logprobs": [None, -1], "top_logprobs": [None, {"b": -1}]},
                "finish_reason": "length",
            }
        ]
    }
    (chunk,) = decode_answer(json.dumps(body).encode())
    first, second = chunk.logprobs
    assert math.isnan(first.logprob)
    assert second == TokenLogprob("b", -1.0, None, (TokenAlternative("b", -1.0),))
    assert (chunk.text, chunk.finish_reason) == ("ab", "length")


@pytest.mark.parametrize("body", [b"", b"<html>", b"{}", b'{"choices":[]}', b'{"error":{"message":"no"}}', b"null"])
def test_a_200_without_an_answer_is_a_failed_target(body: bytes) -> None:
    with pytest.raises(CloudFailed):
        decode_answer(body)


@pytest.mark.slow
@given(st.data(), st.integers(1, 3))
def test_our_own_answers_decode_to_what_was_encoded(data, n) -> None:  # type: ignore[no-untyped-def]
    request = Request(kind="chat", model="m", n=n, include_usage=True)
    chunks = data.draw(answers(n))
    expected, usage = coalesce(chunks)
    encoder = AnswerEncoder(request, "id", "m", 1)
    sent = encoder.start() + b"".join([encoder.chunk(chunk) for chunk in chunks]) + encoder.end()
    streamed = read(*[event.data for event in SSEParser().feed(sent)])
    for received in (streamed, decode_answer(encoder.whole(*coalesce(chunks)))):
        choices, received_usage = coalesce(received)
        assert received_usage == usage
        assert [(c.index, c.text, c.tool_calls, c.finish_reason, c.refusal or None) for c in choices] == [
            (c.index, c.text, c.tool_calls, c.finish_reason, c.refusal or None) for c in expected
        ]


_LIKELY = st.fixed_dictionaries(
    {},
    optional={
        "choices": st.lists(
            st.fixed_dictionaries(
                {},
                optional=dict.fromkeys(("index", "delta", "message", "text", "logprobs", "finish_reason"), json_values),
            ),
            max_size=2,
        )
        | json_values,
        "usage": json_values,
        "error": json_values,
    },
)


@given(st.binary(max_size=60) | _LIKELY.map(lambda value: json.dumps(value).encode()))
def test_anything_a_target_sends_is_an_answer_or_a_backend_error(data: bytes) -> None:
    for decode in (decode_answer, lambda body: read(body, b"[DONE]")):
        try:
            chunks = decode(data)
        except BackendError:
            continue
        assert all(isinstance(chunk, Chunk) for chunk in chunks)
