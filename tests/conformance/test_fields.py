"""Each field of a body: absent as null, refused with its path when its type or range is wrong."""

from __future__ import annotations

import json

import pytest

from .shapes import chat_answer, completion_answer, error
from .surface import Surface

pytestmark = [pytest.mark.triton, pytest.mark.engine, pytest.mark.slow]

NUMBERS = {"temperature": (-0.1, 2.1), "top_p": (-0.1, 1.1), "presence_penalty": (-2.1, 2.1)}
NUMBERS |= {"frequency_penalty": (-2.1, 2.1), "min_p": (-0.1, 1.1)}
SHARED_NULLS = [
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "n",
    "stop",
    "seed",
    "stream",
    "stream_options",
    "logit_bias",
    "user",
    "max_tokens",
    "logprobs",
]
CHAT_NULLS = [
    "max_completion_tokens",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "top_logprobs",
    "functions",
    "function_call",
    "modalities",
    "audio",
    "metadata",
    "store",
    "service_tier",
    "reasoning_effort",
    "prediction",
]
COMPLETION_NULLS = ["echo", "suffix", "best_of"]
WRONG: list[tuple[str, object, str]] = [
    ("model", 5, "model"),
    ("model", "", "model"),
    ("model", None, "model"),
    ("model", ["a"], "model"),
    ("messages", "hi", "messages"),
    ("messages", [], "messages"),
    ("messages", None, "messages"),
    ("messages", {}, "messages"),
    ("messages", ["hi"], "messages[0]"),
    ("messages", [{"content": "a"}], "messages[0].role"),
    ("messages", [{"role": "robot", "content": "a"}], "messages[0].role"),
    ("messages", [{"role": "user"}], "messages[0].content"),
    ("messages", [{"role": "user", "content": None}], "messages[0].content"),
    ("messages", [{"role": "user", "content": 5}], "messages[0].content"),
    ("messages", [{"role": "user", "content": []}], "messages[0].content"),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ("messages", [{"role": "user", "content": [{"type": "smell"}]}], "messages[0].content[0].type"),
    ("messages", [{"role": "user", "content": "a"}, {"role": "user", "content": 7}], "messages[1].content"),
    ("temperature", "hot", "temperature"),
    ("temperature", True, "temperature"),
    ("temperature", [], "temperature"),
    ("top_p", "most", "top_p"),
    ("n", 0, "n"),
    ("n", -1, "n"),
    ("n", 1000, "n"),
    ("n", 1.5, "n"),
    ("n", "two", "n"),
    ("max_tokens", 0, "max_tokens"),
    ("max_tokens", -5, "max_tokens"),
    ("max_tokens", 1.5, "max_tokens"),
    ("max_tokens", "five", "max_tokens"),
    ("max_completion_tokens", 0, "max_completion_tokens"),
    ("stop", 5, "stop"),
    ("stop", "", "stop"),
    ("stop", ["a", ""], "stop[1]"),
    ("stop", ["a", 5], "stop[1]"),
    ("stop", list("abcde"), "stop"),
    ("seed", 1.5, "seed"),
    ("seed", "lucky", "seed"),
    ("stream", "yes", "stream"),
    ("stream", 1, "stream"),
    ("stream_options", "all", "stream_options"),
    ("logit_bias", [], "logit_bias"),
    ("logit_bias", {"word": 5}, "logit_bias"),
    ("logit_bias", {"5": 101}, "logit_bias"),
    ("logit_bias", {"-5": 1}, "logit_bias"),
    ("logprobs", 3, "logprobs"),
    ("logprobs", "yes", "logprobs"),
    ("top_logprobs", 21, "top_logprobs"),
    ("top_logprobs", -1, "top_logprobs"),
    ("top_logprobs", 3, "top_logprobs"),
    ("user", 5, "user"),
    ("parallel_tool_calls", "no", "parallel_tool_calls"),
    ("modalities", ["text", "audio"], "modalities"),
    ("audio", {"voice": "alloy", "format": "wav"}, "audio"),
]


@pytest.mark.parametrize(("field", "value", "param"), WRONG, ids=[f"{one[0]}={str(one[1])[:24]}" for one in WRONG])
def test_a_wrong_value_is_400_and_named(surface: Surface, field: str, value: object, param: str) -> None:
    found = error(surface.chat(**{field: value}), 400)
    assert (found["param"] or "").startswith(param), found
    assert found["type"] == "invalid_request_error"


@pytest.mark.parametrize(("field", "bounds"), NUMBERS.items())
def test_numbers_beyond_their_range_are_400(surface: Surface, field: str, bounds: tuple[float, float]) -> None:
    for value in bounds:
        error(surface.chat(**{field: value}), 400, param=field)
        error(surface.complete(**{field: value}), 400, param=field)


@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "n", "max_tokens", "seed", "top_logprobs", "presence_penalty"]
)
@pytest.mark.parametrize("number", ["1e400", "-1e400", "1" + "0" * 400, "9" * 5000])
def test_huge_numbers_are_400(surface: Surface, field: str, number: str) -> None:
    body = surface.chat_body()
    body.pop(field, None)
    text = json.dumps(body)[:-1] + f', "{field}": {number}}}'
    error(surface.send("POST", "/v1/chat/completions", text.encode()), 400)


def test_a_huge_number_in_an_unknown_field_does_no_harm(surface: Surface) -> None:
    text = json.dumps(surface.chat_body())[:-1] + ', "metadata": {"a": ' + "9" * 5000 + "}}"
    reply = surface.send("POST", "/v1/chat/completions", text.encode())
    if reply.status != 200:
        error(reply, 400)


@pytest.mark.parametrize("field", [*SHARED_NULLS, *CHAT_NULLS])
def test_null_in_a_chat_is_as_if_absent(surface: Surface, field: str) -> None:
    chat_answer(surface.chat(**{"max_tokens": 2, field: None}))


@pytest.mark.parametrize("field", [*SHARED_NULLS, *COMPLETION_NULLS])
def test_null_in_a_completion_is_as_if_absent(surface: Surface, field: str) -> None:
    completion_answer(surface.complete(**{"max_tokens": 2, field: None}))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"])
@pytest.mark.parametrize("missing", ["model", "content"])
def test_a_missing_field_is_400_and_named(surface: Surface, path: str, missing: str) -> None:
    wanted = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/embeddings": "input"}[path]
    content: object = [{"role": "user", "content": "a"}] if wanted == "messages" else "a"
    body = {"model": surface.model, wanted: content}
    absent = "model" if missing == "model" else wanted
    del body[absent]
    error(surface.post(path, body), 400, code="missing_required_parameter", param=absent)


@pytest.mark.parametrize("field", ["temprature", "max_token", "Temperature", "top-p", "respose_format"])
def test_a_misspelt_field_is_400_and_named(surface: Surface, field: str) -> None:
    found = error(surface.chat(**{field: 1}), 400, code="unknown_parameter", param=field)
    assert "did you mean" in found["message"]


@pytest.mark.parametrize("field", ["causeway", "prefer", "tags"])
def test_routing_hints_are_checked(surface: Surface, field: str) -> None:
    error(surface.chat(**{field: "private"}), 400)
