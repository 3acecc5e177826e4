"""`POST /v1/chat/completions`, whole answers."""

from __future__ import annotations

from typing import Any

import pytest

from .shapes import chat_answer, chat_logprobs, error
from .surface import Surface

pytestmark = [pytest.mark.triton, pytest.mark.engine, pytest.mark.slow]

UNBOUNDED: dict[str, Any] = {
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "many", "schema": {"type": "array", "items": {"enum": ["a"]}, "minItems": 60}},
    }
}
"""Makes any model give an answer of at least sixty tokens."""


def test_an_answer_has_openais_fields_and_no_others(surface: Surface) -> None:
    answer = chat_answer(surface.chat())
    assert [choice["index"] for choice in answer["choices"]] == [0]
    assert answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["prompt_tokens"] > 0


def test_each_answer_has_an_id_of_its_own(surface: Surface) -> None:
    first, second = surface.chat(), surface.chat()
    assert first.json["id"] != second.json["id"]
    assert first.headers["x-request-id"] != second.headers["x-request-id"]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_token_limit_ends_the_answer(surface: Surface, name: str) -> None:
    body = surface.chat_body(**UNBOUNDED)
    del body["max_tokens"]
    answer = chat_answer(surface.post("/v1/chat/completions", {**body, name: 7}))
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 7


def test_both_names_of_the_token_limit_may_agree(surface: Surface) -> None:
    assert chat_answer(surface.chat(max_tokens=5, max_completion_tokens=5))
    error(surface.chat(max_tokens=5, max_completion_tokens=6), 400, param="max_completion_tokens")


@pytest.mark.parametrize("n", [1, 2, 5])
def test_n_choices_are_numbered(surface: Surface, n: int) -> None:
    answer = chat_answer(surface.chat(n=n, temperature=0.9, max_tokens=6))
    assert [choice["index"] for choice in answer["choices"]] == list(range(n))
    assert answer["usage"]["completion_tokens"] <= 6 * n


@pytest.mark.parametrize("count", [1, 4])
def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(surface: Surface, count: int) -> None:
    text = surface.chat().text
    stop = text[len(text) // 2 :][:3]
    stops = [stop, "\x01", "\x02", "\x03"][:count]
    answer = chat_answer(surface.chat(stop=stops if count > 1 else stop))
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice.get("stop_reason", stop)) == ("stop", stop)


def test_a_seed_repeats_a_sampled_answer(surface: Surface) -> None:
    """With free text: a restricted answer may have but one form."""
    body = {"model": surface.model, "prompt": "tell me", "temperature": 1.5, "max_tokens": 12}
    texts = [surface.post("/v1/completions", {**body, "seed": seed}).text for seed in (1, 1, 2, 3, 4)]
    assert texts[0] == texts[1]
    assert len(set(texts)) > 1


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_a_seed_is_any_64_bit_number(surface: Surface, seed: int) -> None:
    chat_answer(surface.chat(seed=seed, temperature=1, max_tokens=2))


@pytest.mark.parametrize("alternatives", [None, 0, 3, 20])
def test_logprobs_spell_the_answer(surface: Surface, alternatives: int | None) -> None:
    fields = {} if alternatives is None else {"top_logprobs": alternatives}
    (choice,) = chat_answer(surface.chat(logprobs=True, max_tokens=6, **fields))["choices"]
    assert chat_logprobs(choice["logprobs"], alternatives or 0).startswith(choice["message"]["content"])


def test_logprobs_of_each_choice(surface: Surface) -> None:
    answer = chat_answer(surface.chat(n=2, logprobs=True, top_logprobs=1, temperature=0.9, max_tokens=4))
    for choice in answer["choices"]:
        assert chat_logprobs(choice["logprobs"], 1)


def test_the_prompt_of_several_choices_counts_once(surface: Surface) -> None:
    one, three = surface.chat(max_tokens=2), surface.chat(max_tokens=2, n=3)
    assert three.json["usage"]["prompt_tokens"] == one.json["usage"]["prompt_tokens"]
    assert three.json["usage"]["completion_tokens"] == 3 * one.json["usage"]["completion_tokens"]


def test_a_limit_beyond_the_context_is_no_error(surface: Surface) -> None:
    chat_answer(surface.chat(max_tokens=100_000))


def test_every_choice_of_the_largest_n(surface: Surface) -> None:
    assert len(chat_answer(surface.chat(n=16, temperature=1, max_tokens=2))["choices"]) == 16


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
        [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}],
        [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "hello"},
            {"role": "user", "content": "x"},
        ],
        [{"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": " there"}]}],
        [{"role": "user", "content": "hi", "name": "ann"}],
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": "grüß dich 👋🏽 \u0000 <|im_end|>"}],
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "refusal": "no"}],
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
    ],
    ids=["system", "developer", "turns", "parts", "name", "empty", "unicode", "refusal", "refusal-part"],
)
def test_forms_of_messages(surface: Surface, messages: list[dict[str, object]]) -> None:
    chat_answer(surface.chat(messages=messages))


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"temperature": 2, "top_p": 0.5, "presence_penalty": -2, "frequency_penalty": 2}, "sampling"),
        ({"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}, "vllm"),
        ({"user": "ann", "safety_identifier": "a", "prompt_cache_key": "k"}, "caller"),
        ({"store": False, "metadata": {"a": "b"}, "service_tier": "auto"}, "bookkeeping"),
        ({"reasoning_effort": "low", "verbosity": "low"}, "reasoning"),
        ({"modalities": ["text"], "response_format": {"type": "text"}}, "text"),
        ({"something_of_another_server": {"deep": [1]}}, "unknown"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_fields_that_change_no_shape_are_accepted(surface: Surface, fields: dict[str, object], name: str) -> None:
    chat_answer(surface.chat(**fields))


def test_the_model_is_named_as_it_is_listed(surface: Surface) -> None:
    listed = {model["id"] for model in surface.get("/v1/models").json["data"]}
    assert surface.model in listed
    assert surface.chat().json["model"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_does_not_fit_is_400(surface: Surface, stream: bool) -> None:
    reply = surface.chat("word " * 9000, stream=stream)
    found = error(reply, 400, code="context_length_exceeded")
    assert found["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_an_image_for_a_model_of_text_is_400(surface: Surface, stream: bool) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    error(surface.chat(messages=[{"role": "user", "content": [part]}], stream=stream), 400)
