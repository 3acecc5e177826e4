"""`POST /v1/completions`, whole answers."""

from __future__ import annotations

import pytest

from .shapes import completion_answer, completion_stream, error, streamed_text
from .surface import Surface

pytestmark = [pytest.mark.triton, pytest.mark.engine, pytest.mark.slow]


def test_an_answer_has_openais_fields_and_no_others(surface: Surface) -> None:
    answer = completion_answer(surface.complete())
    (choice,) = answer["choices"]
    assert choice["index"] == 0
    assert choice["text"]
    assert choice["logprobs"] is None


@pytest.mark.parametrize(
    ("prompt", "choices"),
    [("turn on", 1), (["turn on", "play some"], 2), ([5, 6, 7], 1), ([[5, 6, 7], [8, 9]], 2), (["turn on"], 1)],
    ids=["text", "texts", "tokens", "lists", "one"],
)
@pytest.mark.parametrize("n", [1, 2])
def test_each_prompt_has_n_choices(surface: Surface, prompt: object, choices: int, n: int) -> None:
    answer = completion_answer(surface.complete(prompt=prompt, n=n, max_tokens=2))
    assert [choice["index"] for choice in answer["choices"]] == list(range(choices * n))


def test_choices_are_in_the_order_of_the_prompts(surface: Surface) -> None:
    alone = [surface.complete(prompt=prompt).text for prompt in ("turn on the", "play some")]
    together = completion_answer(surface.complete(prompt=["turn on the", "play some"], n=2))
    assert [choice["text"] for choice in together["choices"]] == [alone[0], alone[0], alone[1], alone[1]]


def test_tokens_of_a_prompt_are_counted(surface: Surface) -> None:
    assert surface.complete(prompt=[5, 6, 7]).json["usage"]["prompt_tokens"] == 3
    assert surface.complete(prompt=[[5, 6, 7], [8, 9]], n=2).json["usage"]["prompt_tokens"] == 5


def test_the_token_limit_ends_the_answer(surface: Surface) -> None:
    answer = completion_answer(surface.complete(max_tokens=3))
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_echo_begins_with_the_prompt(surface: Surface, stream: bool) -> None:
    text = surface.complete().text
    reply = surface.complete(echo=True, stream=stream)
    echoed = streamed_text(completion_stream(reply)) if stream else completion_answer(reply)["choices"][0]["text"]
    assert echoed == "turn on the" + text


def test_an_echo_of_each_prompt(surface: Surface) -> None:
    answer = completion_answer(surface.complete(prompt=["turn on", "play"], echo=True, n=2, max_tokens=1))
    starts = [
        choice["text"].startswith(prompt)
        for choice, prompt in zip(answer["choices"], ["turn on", "turn on", "play", "play"], strict=True)
    ]
    assert all(starts)


@pytest.mark.parametrize("echo", [False, True])
def test_no_tokens_are_refused(surface: Surface, echo: bool) -> None:
    """Zero is a limit that no model here can keep, and not the default."""
    error(surface.complete(max_tokens=0, echo=echo), 400, param="max_tokens")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_echo_with_logprobs_is_refused(surface: Surface, stream: bool) -> None:
    """They are those of the prompt too, which no model here reports."""
    error(surface.complete(echo=True, logprobs=1, stream=stream), 400, code="unsupported_feature", param="echo")


def test_a_long_list_of_prompts_is_answered_or_refused_for_good(surface: Surface) -> None:
    """It never gets an error that invites a retry, which could not succeed either."""
    reply = surface.complete(prompt=[[5 + index % 50] for index in range(300)], max_tokens=1)
    if reply.status == 200:
        assert len(completion_answer(reply)["choices"]) == 300
    else:
        error(reply, 400, param="prompt")


@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs_are_parallel_lists(surface: Surface, count: int) -> None:
    answer = completion_answer(surface.complete(logprobs=count))
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    assert set(logprobs) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["text_offset"])
    assert len(logprobs["tokens"]) == answer["usage"]["completion_tokens"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert all(value <= 0 for value in logprobs["token_logprobs"])
    for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        assert choice["text"][offset:].startswith(token)
    if count == 0:
        assert logprobs["top_logprobs"] is None
    else:
        for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
            assert token in top
            assert count <= len(top) <= count + 1


def test_a_stop_string_ends_the_answer(surface: Surface) -> None:
    text = surface.complete(max_tokens=20).text
    stop = text[len(text) // 2 :][:3]
    answer = completion_answer(surface.complete(max_tokens=20, stop=[stop]))
    assert answer["choices"][0]["text"] == text[: text.index(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_a_stop_string_in_an_echoed_prompt_stops_nothing(surface: Surface) -> None:
    plain = surface.complete(stop=["turn"])
    answer = completion_answer(surface.complete(stop=["turn"], echo=True))
    assert answer["choices"][0]["text"] == "turn on the" + plain.text


def test_a_bias_forces_and_bans_tokens(surface: Surface) -> None:
    (forced,) = completion_answer(surface.complete(logit_bias={"40": 100}, max_tokens=1))["choices"]
    answer = completion_answer(surface.complete(logit_bias={"40": 100}, max_tokens=3))
    assert answer["choices"][0]["text"] == 3 * forced["text"]
    both = completion_answer(surface.complete(logit_bias={"40": -100, "41": 100}, max_tokens=3))
    assert forced["text"] not in both["choices"][0]["text"]


def test_choices_with_one_seed_differ(surface: Surface) -> None:
    answer = completion_answer(surface.complete(n=3, seed=7, temperature=1.5))
    assert len({choice["text"] for choice in answer["choices"]}) > 1


def test_a_suffix_is_refused(surface: Surface) -> None:
    """No model here fills in the middle; a suffix that is ignored would look honoured."""
    error(surface.complete(suffix="the end"), 400, code="unsupported_feature", param="suffix")


@pytest.mark.parametrize("suffix", [None, ""])
def test_an_empty_suffix_is_none(surface: Surface, suffix: str | None) -> None:
    completion_answer(surface.complete(suffix=suffix))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 3}, "best_of"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [""] * 2049}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": [1, 99_999_999]}, None),
        ({"prompt": [2**40]}, "prompt[0]"),
        ({"prompt": "word " * 9000}, None),
    ],
    ids=lambda value: "" if isinstance(value, dict) else str(value),
)
def test_an_invalid_prompt_is_400(surface: Surface, fields: dict[str, object], param: str | None) -> None:
    found = error(surface.complete(**fields), 400)
    assert param in (None, found["param"]), found


def test_best_of_no_more_than_the_choices_changes_nothing(surface: Surface) -> None:
    completion_answer(surface.complete(best_of=1))
    completion_answer(surface.complete(best_of=2, n=2, temperature=0.5))
