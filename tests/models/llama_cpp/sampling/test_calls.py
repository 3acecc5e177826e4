"""Answers constrained by the call grammar: the device's own model in the engine, as the product runs it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from causeway_server.models.catalog.artifact import find_artifact
from causeway_server.models.constraints.grammars import (
    ANSWER_TOKENS,
    ANY_CALL,
    MAX_CHARACTERS,
    MAX_PIECES,
    call_grammar,
)
from causeway_server.models.llama_cpp.protocol import EngineOptions, Prompt
from causeway_server.router.types import Message, Sampling
from causeway_train.data.prompt_renderer import PromptRenderer
from causeway_train.evaluate.greedy import GreedyModel
from causeway_train.function_calls.call import parse_call

from ..conftest import Answer, Rig

ASSISTANT = find_artifact("assistant")
ALARM, QUESTION = "wake me up at six am", "what is the capital of france"
TEXTS = (
    ALARM,
    QUESTION,
    "turn off the lights in the kitchen",
    "turn on the wemo plug socket",
    "dim the bedroom lights",
    "make the lights blue",
    "please vacuum the floor",
    "make me a cup of coffee",
    "mute the speakers",
    "turn the volume up",
    "lower the volume to thirty",
    "set an alarm for seven thirty on monday",
    "remove my alarm for tomorrow morning",
    "what alarms do i have set",
    "add milk and eggs to my shopping list",
    "what is on my grocery list",
    "delete the list of chores",
    "remind me to call mom at noon",
    "what is on my calendar for friday",
    "cancel my meeting with bob on tuesday",
    "will it rain in london tomorrow",
    "what's the weather like in Fort Belvoir, Alaska?",
    "is it going to be chilly at 4 pm in Guinea-Bissau",
    "play some jazz by miles davis",
    "play The Song of Hiawatha by Kool Keith on Spotify",
    "Play Varney the Vampire Varney the Vampire",
    "Add Suites & Sweets to my Latin Dance Cardio playlist",
    'Add "Ain\'t No Rest" by Cage the Elephant to my Sunday \\ Morning list',
    "add this tune to my Café Bar playlist",
    "rate The Mystery of the Yellow Room 4 out of 6 stars",
    "give this novel a zero",
    "Rate this current essay five points",
    "find the soundtrack called Shrek the Third",
    "Where can I see the picture The Lost Patrol?",
    "which movies are playing at Wanda Group near here at 9 o'clock",
    "book a table for two at a Greek bistro in Rome next month",
    "I want to eat at The Ledbury with four of my friends at 7 pm",
    "what time is it in tokyo",
    "what is today's date",
    "how many minutes until noon in new york",
    "play the next podcast episode",
    "start playing the audiobook i listened to yesterday",
    "play radio four",
    "play monopoly with me",
    "write me a poem about dogs",
    "Explain quantum computing in three sentences.",
    "how do i transfer money to my savings account",
    "who wrote war and peace",
    "translate hello to french",
    "日本 の 天気",
)
ODD = (
    "",
    " \n\t ",
    'say "six\\am" to  me, "" \\\\',
    "tab\tand\nline \x07 \x00 \x1b[31m \x7f \u0085 \u2028",
    "日本の天気を教えて",
    "كيف حال الطقس؟ 🌧️👩‍👩‍👧",
    "half a character: \ud83d",
    "<|user|><|end|><|refuse|> ::= root",
    "word " * MAX_PIECES,
    "x" * MAX_CHARACTERS,
    "x" * 100_000,
)
END = {"refusal": "end", "confidence_tokens": 8}


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """One sequence and no prefix cache: the last digits of a logit depend on the batch."""
    rig = Rig(
        EngineOptions(
            model_path=str(ASSISTANT.path),
            threads=1,
            sequences=1,
            prefix_cache_bytes=0,
            refuse_token=ASSISTANT.manifest.refuse_token or "",
        )
    )
    yield rig
    rig.engine.close()


def user_prompt(text: str) -> Prompt:
    return Prompt(messages=(Message("user", text),))


def constrained(rig: Rig, text: str, **fields: object) -> Answer:
    return rig.run(user_prompt(text), **{"max_tokens": ANSWER_TOKENS, "copy_source": text, **fields})


def values(answer: Answer | str) -> list[str]:
    text = answer if isinstance(answer, str) else answer.text
    call = parse_call(text)
    assert call is not None, text
    return [item for value in call.arguments.values() for item in (value if isinstance(value, list) else [value])]


@pytest.mark.slow
def test_the_engine_answers_as_evaluation_does(rig: Rig) -> None:
    """`evaluate --grammar` measures what users get: the same answers to the same messages, refusals included."""
    assert len(TEXTS) == 50
    with GreedyModel(ASSISTANT.path, slots=1, context=512, threads=1) as model:
        renderer = PromptRenderer(model.chat_template)
        prompts = [model.tokenize(renderer.user(text)) for text in TEXTS]
        measured = model.answers(prompts, ANSWER_TOKENS, [call_grammar(text) for text in TEXTS])
    answers = [constrained(rig, text) for text in TEXTS]
    assert [answer.text for answer in answers] == [answer.text for answer in measured]
    assert {answer.end.refused for answer in answers} == {True, False}
    for text, answer in zip(TEXTS, answers, strict=True):
        assert all(value in text for value in values(answer))


def test_arguments_are_words_of_the_copy_source(rig: Rig) -> None:
    """Whatever the prompt contains: here it names one time and the copy source another."""
    free, copied = (
        rig.run(user_prompt(ALARM), max_tokens=64),
        rig.run(user_prompt(ALARM), max_tokens=64, copy_source="at nine pm"),
    )
    assert any("six" in value for value in values(free))
    assert values(copied)
    assert all(value in "at nine pm" for value in values(copied))


@pytest.mark.parametrize("text", ODD)
def test_any_copy_source_gives_a_call(rig: Rig, text: str) -> None:
    """Control characters, other scripts, pages of text."""
    answer = rig.run(user_prompt("play it"), copy_source=text, max_tokens=ANSWER_TOKENS, refusal="skip")
    assert answer.end.error == ""
    assert answer.end.finish_reason == "stop"
    assert parse_call(answer.text) is not None, answer.text


@pytest.mark.parametrize("seed", range(8))
def test_sampled_answers_are_constrained_too(rig: Rig, seed: int) -> None:
    """At a temperature at which the model alone writes noise."""
    text = "play Sunday Morning by The Velvet Underground"
    answer = constrained(rig, text, sampling=Sampling(temperature=2.0, seed=seed), max_tokens=1500)
    assert all(value in text for value in values(answer))


# --- refusals and confidence ------------------------------------------------------------------------------------------


def test_a_refusal_ends_the_answer_before_the_grammar(rig: Rig) -> None:
    answer = constrained(rig, QUESTION, **END)
    assert answer.end.refused
    assert (answer.text, answer.tokens) == ("", 1)


def test_a_skipped_refusal_is_followed_by_a_call(rig: Rig) -> None:
    answer = constrained(rig, QUESTION, refusal="skip")
    assert answer.end.refused
    assert parse_call(answer.text) is not None


def test_a_refusal_comes_first_or_not_at_all(rig: Rig) -> None:
    """After the first token the model cannot leave the call."""
    refuse = rig.engine.core.vocabulary.refuse_token
    assert refuse is not None
    answer = constrained(rig, ALARM, sampling=Sampling(temperature=0.0, logit_bias=((refuse, 100.0),)), refusal="skip")
    assert answer.end.refused
    assert parse_call(answer.text) is not None


@pytest.mark.parametrize("text", [ALARM, QUESTION, *TEXTS[20:28]])
def test_the_first_token_s_confidence_is_the_model_s_own(rig: Rig, text: str) -> None:
    """The calibrator was fitted on probabilities before any grammar."""
    free, copied = rig.run(user_prompt(text), max_tokens=1, **END), constrained(rig, text, max_tokens=1, **END)
    assert copied.confidences == free.confidences
    assert copied.confidences[0].tokens == 1


def test_logprobs_are_the_model_s_own(rig: Rig) -> None:
    """Also of a token that it would not have chosen."""
    free = rig.run(user_prompt(ALARM), max_tokens=64, logprobs=0)
    copied = rig.run(user_prompt(ALARM), max_tokens=64, logprobs=0, copy_source="at nine pm")
    first = next(
        at for at, (a, b) in enumerate(zip(free.logprobs, copied.logprobs, strict=False)) if a.token != b.token
    )
    assert copied.logprobs[:first] == free.logprobs[:first]
    assert copied.logprobs[first].logprob < free.logprobs[first].logprob


# --- when the grammar does not apply ----------------------------------------------------------------------------------


def test_the_job_s_grammar_replaces_the_call_grammar(rig: Rig) -> None:
    assert constrained(rig, ALARM, grammar='start: "no"').text == "no"
    assert constrained(rig, ALARM, json_schema='{"const":7}').text.strip() == "7"


def test_ignore_eos_disables_the_call_grammar(rig: Rig) -> None:
    """A call ends, and nothing could follow it."""
    answer = constrained(rig, ALARM, ignore_eos=True, max_tokens=80)
    assert answer.text == rig.run(user_prompt(ALARM), ignore_eos=True, max_tokens=80).text


def test_a_long_copy_source_allows_any_text_in_a_call(rig: Rig) -> None:
    assert call_grammar("x" * 100_000) == ANY_CALL
    answer = rig.run(user_prompt(ALARM), max_tokens=64, copy_source="x" * 100_000)
    assert any("six" in value for value in values(answer))
