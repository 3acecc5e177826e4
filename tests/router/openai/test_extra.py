"""Fields that we do not interpret travel with the message, part, tool or call that they belong to."""

from __future__ import annotations

import json

import pytest

from causeway_server.router.openai.answer import AnswerEncoder, coalesce
from causeway_server.router.openai.chat import parse_chat
from causeway_server.router.openai.request_body import merged_extra
from causeway_server.router.openai.upstream.wire import encode_request
from causeway_server.router.types import Chunk, Request, RoutingHints, ToolCallDelta

MARK = {"cache_control": {"type": "ephemeral", "n": 1.5}}
MESSAGES = [
    {"role": "user", "content": "hello", **MARK},
    {"role": "user", "name": "ann", "content": [{"type": "text", "text": "a", **MARK}]},
    {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": "data:,", "detail": "low", "x": 1}, **MARK}],
    },
    {
        "role": "user",
        "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav", "x": 1}, **MARK}],
    },
    {"role": "user", "content": [{"type": "file", "file": {"file_data": "x", "y": 1}, **MARK}]},
    {"role": "assistant", "content": "so", "reasoning_content": "hm", **MARK},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}", "x": 1}, **MARK}],
    },
    {"role": "tool", "tool_call_id": "a", "content": "cold", **MARK},
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "x": 1}, **MARK}


def sent(**body: object) -> dict[str, object]:
    request = parse_chat(json.dumps({"model": "m", **body}).encode(), RoutingHints())
    decoded = json.loads(encode_request(request, "m"))
    assert isinstance(decoded, dict)
    return decoded


@pytest.mark.parametrize("at", range(len(MESSAGES)))
def test_a_message_is_sent_as_it_came(at: int) -> None:
    assert sent(messages=[MESSAGES[at]])["messages"] == [MESSAGES[at]]


def test_a_tool_is_sent_as_it_came() -> None:
    assert sent(messages=MESSAGES[:1], tools=[TOOL])["tools"] == [TOOL]


def test_null_counts_as_absent() -> None:
    assert sent(messages=[{"role": "user", "content": "a", "x": None}])["messages"] == [
        {"role": "user", "content": "a"}
    ]


def test_an_unknown_field_changes_no_field_of_ours() -> None:
    """A field of the same name inside `function` comes from us."""
    call = ToolCallDelta(0, "{}", "a", "f", '{"function":{"name":"g","x":1},"id":"b"}')
    chunk = Chunk(tool_calls=(call,), finish_reason="tool_calls", extra='{"x":1}')
    encoder = AnswerEncoder(Request(kind="chat", model="m"), "id", "m", 1)
    (choice,) = json.loads(encoder.whole(*coalesce([chunk])))["choices"]
    assert choice["message"]["x"] == 1
    assert choice["message"]["tool_calls"] == [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}", "x": 1}}
    ]


def test_pieces_of_a_stream_are_joined() -> None:
    parts = ['{"details":[1],"text":"a","o":{"s":"x"},"n":1}', '{"details":[2],"text":"b","o":{"s":"y"},"n":2}']
    assert json.loads(merged_extra(parts)) == {"details": [1, 2], "text": "ab", "o": {"s": "xy"}, "n": 2}
    assert merged_extra([]) == ""
