"""The expected length of answers, learned from earlier ones: kinds of prompts, drift and limits."""

from __future__ import annotations

import pytest

from causeway_server.edge_node.signals.lengths import AnswerLengths, length_inputs
from causeway_server.router.decision.candidates import MOST_TOKENS

QUIZ = "Which planet is the largest?\nA. Mars\nB. Jupiter\nC. Venus"
SUM = "Ann has 12 apples and buys 7 bags of 4 apples each. How many apples does she have in total?"
LENGTHS = {QUIZ: 2.0, SUM: 240.0}


def taught(answers: int, lengths: dict[str, float], into: AnswerLengths | None = None) -> AnswerLengths:
    """Teach answers to both prompts in turns, half of them with half the length, half with one and a half."""
    found = into or AnswerLengths()
    for number in range(answers):
        text = (QUIZ, SUM)[number % 2]
        found.learn(length_inputs(text, None), lengths[text] * (0.5, 1.5)[number // 2 % 2])
    return found


def expected(lengths: AnswerLengths, text: str, limit: int | None = None) -> float:
    tokens = lengths.expected(length_inputs(text, limit))
    assert tokens is not None
    return tokens


def test_each_kind_of_prompt_has_its_own_mean_length() -> None:
    """The mean, and not the exponential of the mean logarithm, which is shorter by an eighth here."""
    lengths = taught(400, LENGTHS)
    assert expected(lengths, SUM) == pytest.approx(240, rel=0.05)
    assert expected(lengths, QUIZ) == pytest.approx(2, abs=0.5)


def test_a_few_answers_say_nothing() -> None:
    lengths = taught(29, LENGTHS)
    assert lengths.expected(length_inputs(SUM, None)) is None
    lengths.learn(length_inputs(SUM, None), 240)
    assert expected(lengths, SUM) > 100


def test_another_model_behind_the_same_name_is_learned() -> None:
    lengths = taught(1000, {QUIZ: 200.0, SUM: 20.0}, taught(1000, LENGTHS))
    assert expected(lengths, QUIZ) > 100
    assert expected(lengths, SUM) < 40


def test_the_clients_limit_says_more_than_an_equal_prompt() -> None:
    lengths = AnswerLengths()
    for _ in range(100):
        lengths.learn(length_inputs("Go on.", 4), 4)
        lengths.learn(length_inputs("Go on.", 400), 300)
    assert expected(lengths, "Go on.", 4) < 10
    assert expected(lengths, "Go on.", 400) > 200


def test_estimates_stay_within_what_an_answer_may_have() -> None:
    """For any prompt, however unlike the earlier ones; also after many answers of one kind."""
    lengths = AnswerLengths()
    for _ in range(20_000):
        lengths.learn(length_inputs(QUIZ, 4), 1)
    for text in ("", SUM * 80, "{" * 9000, "1 " * 5000, "A. x\n" * 2000):
        for limit in (1, None):
            assert 1.0 <= expected(lengths, text, limit) <= MOST_TOKENS


def test_one_absurd_length_is_forgotten_soon() -> None:
    """A server that reports more tokens than an answer may have does not spoil the estimate for long."""
    lengths = AnswerLengths()
    inputs = length_inputs("What is the capital of France?", None)
    for tokens in [*[25.0] * 50, 2.0**31, *[25.0] * 500]:
        lengths.learn(inputs, tokens)
    found = lengths.expected(inputs)
    assert found is not None
    assert found < 60
