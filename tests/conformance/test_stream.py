"""Streams of server-sent events, of chat answers and of legacy completions."""

from __future__ import annotations

import json

import pytest

from .shapes import chat_logprobs, chat_stream, choices_of, completion_stream, error, parts, streamed_text
from .surface import Surface, events
from .test_chat import UNBOUNDED

pytestmark = [pytest.mark.triton, pytest.mark.engine, pytest.mark.slow]


def test_a_stream_spells_the_whole_answer(surface: Surface) -> None:
    whole = surface.chat()
    chunks = chat_stream(surface.chat(stream=True))
    assert streamed_text(chunks) == whole.text
    assert parts(chunks)[-1]["finish_reason"] == whole.json["choices"][0]["finish_reason"]


def test_a_completions_stream_spells_the_whole_answer(surface: Surface) -> None:
    assert streamed_text(completion_stream(surface.complete(stream=True))) == surface.complete().text


def test_a_stream_is_not_cached_by_proxies(surface: Surface) -> None:
    reply = surface.chat(stream=True)
    assert reply.headers["cache-control"] == "no-cache"
    assert surface.twice or "content-length" not in reply.headers


def test_the_first_chunk_has_the_role_and_nothing_else(surface: Surface) -> None:
    first = json.loads(events(surface.chat(stream=True))[0])
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_obfuscation": False}])
def test_no_chunk_has_usage_unless_it_is_requested(surface: Surface, options: dict[str, bool] | None) -> None:
    chunks = chat_stream(surface.chat(stream=True, stream_options=options))
    assert not [chunk for chunk in chunks if "usage" in chunk]


def test_usage_comes_last_in_a_chunk_without_choices(surface: Surface) -> None:
    whole = surface.chat().json["usage"]
    last = chat_stream(surface.chat(stream=True, stream_options={"include_usage": True}))[-1]
    for name in ("prompt_tokens", "completion_tokens"):
        assert last["usage"][name] == whole[name]


def test_usage_of_a_completion(surface: Surface) -> None:
    chunks = completion_stream(surface.complete(stream=True, stream_options={"include_usage": True}))
    assert chunks[-1]["usage"]["completion_tokens"] == 8


def test_n_streamed_choices_each_have_a_role_and_an_end(surface: Surface) -> None:
    chunks = chat_stream(surface.chat(stream=True, n=3, temperature=0.9, max_tokens=6))
    assert choices_of(chunks) == {0, 1, 2}


def test_streamed_logprobs_spell_the_answer(surface: Surface) -> None:
    chunks = chat_stream(surface.chat(stream=True, logprobs=True, top_logprobs=2, max_tokens=6))
    found = [part["logprobs"] for part in parts(chunks) if part["logprobs"]]
    assert "".join(chat_logprobs(each, 2) for each in found).startswith(streamed_text(chunks))
    assert sum(len(each["content"]) for each in found) <= 6


def test_a_stop_string_never_leaks_into_a_stream(surface: Surface) -> None:
    text = surface.chat().text
    stop = text[len(text) // 2 :][:3]
    chunks = chat_stream(surface.chat(stream=True, stop=stop))
    assert streamed_text(chunks) == text[: text.index(stop)]
    assert parts(chunks)[-1]["finish_reason"] == "stop"


def test_the_token_limit_ends_a_stream(surface: Surface) -> None:
    chunks = chat_stream(surface.chat(stream=True, max_tokens=7, stream_options={"include_usage": True}, **UNBOUNDED))
    assert parts(chunks)[-1]["finish_reason"] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 7


def test_each_event_is_whole_utf8(surface: Surface) -> None:
    """A token may hold a part of a character; no event does."""
    schema = {"enum": ["grüß dich, señor"]}
    form = {"type": "json_schema", "json_schema": {"name": "greeting", "schema": schema}}
    reply = surface.chat(stream=True, response_format=form, max_tokens=100)
    assert json.loads(streamed_text(chat_stream(reply))) == schema["enum"][0]
    for event in events(reply):
        assert "\N{REPLACEMENT CHARACTER}" not in event.decode()


@pytest.mark.parametrize("options", [{}, {"include_usage": True}])
@pytest.mark.parametrize("stream", [False, None])
def test_stream_options_need_a_stream(surface: Surface, options: dict[str, bool], stream: bool | None) -> None:
    error(surface.chat(stream=stream, stream_options=options), 400, param="stream_options")
    error(surface.complete(stream=stream, stream_options=options), 400, param="stream_options")


def test_an_error_before_the_first_event_has_a_status(surface: Surface) -> None:
    error(surface.chat(stream=True, temperature=9), 400, param="temperature")
    error(surface.chat(stream=True, model="nothing"), 404, code="model_not_found")


def test_streamed_choices_of_several_prompts(surface: Surface) -> None:
    chunks = completion_stream(surface.complete(stream=True, prompt=["turn on", "play some"], n=2, temperature=0.7))
    assert choices_of(chunks) == {0, 1, 2, 3}


def test_streamed_logprobs_of_a_completion(surface: Surface) -> None:
    chunks = completion_stream(surface.complete(stream=True, logprobs=2))
    found = [part["logprobs"] for part in parts(chunks) if part["logprobs"]]
    tokens = [token for each in found for token in each["tokens"]]
    offsets = [offset for each in found for offset in each["text_offset"]]
    assert "".join(tokens).startswith(streamed_text(chunks))
    assert offsets == sorted(offsets)
    assert offsets[0] == 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_greedy_answers_come_from_the_cache_where_there_is_one(surface: Surface, stream: bool) -> None:
    """So the other tests see what they mean to see. `coalesced`: the first answer is still being stored."""
    reply = surface.chat("is this cached", stream=stream)
    assert (reply.headers.get("x-causeway-cache") in ("hit", "coalesced")) == surface.twice
