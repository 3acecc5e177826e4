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
WORDS = st.text(min_size=1, max_size=8)
FEW = st.integers(1, 4)
CALL = st.fixed_dictionaries(
    {"id": TEXT, "type": st.just("function"), "function": st.fixed_dictionaries({"name": WORDS, "arguments": TEXT})}
)
PART = st.sampled_from(
    [{"type": "text", "text": "a"}, {"type": "text", "text": ""}, {"type": "refusal", "refusal": "no"}]
)
CONTENT = TEXT | st.lists(PART, min_size=1, max_size=3)
MESSAGE = st.one_of(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "developer", "user", "assistant"]), "content": CONTENT},
        optional={"name": TEXT},
    ),
    st.fixed_dictionaries({"role": st.just("assistant"), "tool_calls": st.lists(CALL, max_size=2)}),
    st.fixed_dictionaries({"role": st.just("tool"), "content": CONTENT, "tool_call_id": WORDS}),
    st.fixed_dictionaries({"role": st.just("function"), "content": TEXT, "name": WORDS}),
)
PARAMETERS = st.sampled_from(
    [{"type": "object"}, {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}, {}]
)
TOOL: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "type": st.just("function"),
        "function": st.fixed_dictionaries(
            {"name": st.sampled_from("abcd")}, optional={"parameters": PARAMETERS, "strict": st.booleans()}
        ),
    }
)
SCHEMA = st.sampled_from([{"type": "object"}, {"enum": ["a", 1]}, {"type": "array", "items": {"type": "null"}}, {}])
FORMAT = st.sampled_from([{"type": "text"}, {"type": "json_object"}]) | SCHEMA.map(
    lambda schema: {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
)
SHARED: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(-1, 50),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "n": FEW,
    "stop": WORDS | st.lists(WORDS, max_size=4),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "logit_bias": st.dictionaries(st.integers(0, 300).map(str), st.integers(-100, 100), max_size=3),
    "stream": st.booleans(),
    "user": TEXT,
}
CHAT = SHARED | {
    "messages": st.lists(MESSAGE, min_size=1, max_size=3),
    "tools": st.lists(TOOL, max_size=2, unique_by=lambda tool: tool["function"]["name"]),
    "tool_choice": st.sampled_from(["auto", "none"]),
    "parallel_tool_calls": st.booleans(),
    "response_format": FORMAT,
    "logprobs": st.booleans(),
}
COMPLETION = SHARED | {
    "prompt": WORDS | st.lists(WORDS, min_size=1, max_size=3) | st.lists(st.integers(0, 300), min_size=1, max_size=4),
    "logprobs": st.integers(0, 5),
}
EMBEDDING: dict[str, st.SearchStrategy[Any]] = {
    "input": WORDS | st.lists(WORDS, min_size=1, max_size=3) | st.lists(st.integers(0, 300), min_size=1, max_size=4),
    "user": TEXT,
}
OTHERS = ("model", "max_tokens", "stream_options", "top_logprobs", "best_of", "suffix", "echo", "dimensions")
_SETTINGS = settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


def bodies(fields: dict[str, st.SearchStrategy[Any]], required: str) -> st.SearchStrategy[dict[str, Any]]:
    """Valid values of some fields; in every other body one field has a value of any kind."""
    right = st.fixed_dictionaries(
        {required: fields[required]}, optional={name: values for name, values in fields.items() if name != required}
    )
    wrong = st.dictionaries(st.sampled_from([*fields, *OTHERS]), ANYTHING, min_size=1, max_size=1)
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
