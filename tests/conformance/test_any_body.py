"""Bodies at random: each field of a request is right or wrong, and the reply is an answer or OpenAI's error object."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .shapes import chat_answer, chat_stream, completion_answer, completion_stream, embedding_answer, error
from .surface import Surface

pytestmark = [pytest.mark.triton, pytest.mark.engine, pytest.mark.slow]

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)
TEXT = st.text(max_size=30)
NUMBER = st.floats(-3, 3) | st.integers(-3, 3)
SMALL = st.integers(-1, 6)
CALL = st.fixed_dictionaries(
    {"id": TEXT, "type": st.just("function"), "function": st.fixed_dictionaries({"name": TEXT, "arguments": TEXT})}
)
PART = st.sampled_from(
    [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": "data:,"}},
        {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
        {"type": "file", "file": {"file_id": "x"}},
        {"type": "refusal", "refusal": "no"},
        {"type": "text"},
        {},
    ]
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "function", "robot"])},
    optional={
        "content": TEXT | st.none() | st.lists(PART, max_size=3),
        "name": TEXT,
        "tool_calls": st.lists(CALL, max_size=2),
        "tool_call_id": TEXT,
        "refusal": TEXT | st.none(),
    },
)
TOOL = st.fixed_dictionaries(
    {
        "type": st.just("function"),
        "function": st.fixed_dictionaries(
            {"name": st.sampled_from(["a", "b"]) | TEXT}, optional={"parameters": ANYTHING, "strict": st.booleans()}
        ),
    }
)
SCHEMA = st.sampled_from([{"type": "object"}, {"enum": ["a", 1]}, {"type": "nothing"}, {"$ref": "#/x"}, {}]) | ANYTHING
SHARED: dict[str, st.SearchStrategy[Any]] = {
    "temperature": NUMBER,
    "top_p": NUMBER,
    "top_k": SMALL,
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "n": SMALL,
    "stop": TEXT | st.lists(TEXT, max_size=5),
    "seed": st.integers(),
    "logit_bias": st.dictionaries(st.integers(-1, 300).map(str), st.integers(-101, 101), max_size=3),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans()}),
    "user": TEXT,
}
CHAT = SHARED | {
    "messages": st.lists(MESSAGE, min_size=1, max_size=3),
    "tools": st.lists(TOOL, max_size=2),
    "tool_choice": st.sampled_from(
        ["auto", "none", "required", "any", {"type": "function", "function": {"name": "a"}}, {"type": "function"}]
    ),
    "parallel_tool_calls": st.booleans(),
    "response_format": st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "json_object", "json_schema", "xml"])},
        optional={"json_schema": st.fixed_dictionaries({"name": TEXT}, optional={"schema": SCHEMA})},
    ),
    "logprobs": st.booleans(),
    "top_logprobs": SMALL,
    "max_completion_tokens": SMALL,
}
COMPLETION = SHARED | {
    "prompt": TEXT | st.lists(TEXT, max_size=3) | st.lists(st.integers(-1, 600), max_size=4),
    "logprobs": SMALL,
    "echo": st.booleans(),
    "suffix": TEXT,
    "best_of": SMALL,
}
EMBEDDING: dict[str, st.SearchStrategy[Any]] = {
    "input": TEXT | st.lists(TEXT, max_size=3) | st.lists(st.integers(-1, 600), max_size=4),
    "encoding_format": st.just("float"),
    "dimensions": SMALL,
    "user": TEXT,
}
_SETTINGS = settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


def bodies(fields: dict[str, st.SearchStrategy[Any]], required: str) -> st.SearchStrategy[dict[str, Any]]:
    """A few fields each, the required one nearly always, and seldom a value of any kind."""
    right = st.fixed_dictionaries(
        {required: fields[required]}, optional={name: values for name, values in fields.items() if name != required}
    )
    wrong = st.dictionaries(st.sampled_from([*fields, "model", "max_tokens"]), ANYTHING, max_size=1)
    return st.builds(lambda chosen, odd: chosen | odd, right, st.just({}) | wrong)


def check(surface: Surface, path: str, body: dict[str, Any]) -> None:
    """Whatever the body, the reply is well formed and the fault is the client's."""
    reply = surface.post(path, {"model": surface.model, "max_tokens": 3} | body)
    if reply.status != 200:
        assert reply.status in (400, 404)
        error(reply, reply.status)
    elif path == "/v1/embeddings":
        embedding_answer(reply)
    elif path == "/v1/completions":
        (completion_stream if body.get("stream") else completion_answer)(reply)
    else:
        (chat_stream if body.get("stream") else chat_answer)(reply)


@_SETTINGS
@given(body=bodies(CHAT, "messages"))
def test_any_chat(surface: Surface, body: dict[str, Any]) -> None:
    check(surface, "/v1/chat/completions", body)


@_SETTINGS
@given(body=bodies(COMPLETION, "prompt"))
def test_any_completion(surface: Surface, body: dict[str, Any]) -> None:
    check(surface, "/v1/completions", body)


@_SETTINGS
@given(body=bodies(EMBEDDING, "input"))
def test_any_embedding(surface: Surface, body: dict[str, Any]) -> None:
    check(surface, "/v1/embeddings", body)
