"""How answers are graded: by reference, and without one by agreement with the large model."""

from __future__ import annotations

import numpy as np
import pytest

from causeway_server.models.comparison.prompts import EvaluationPrompt, chosen_letter
from causeway_server.models.signals.agreement import last_number, same_text
from causeway_server.models.signals.encoder import Vector
from causeway_server.router.types import Confidence
from causeway_train.calibrate.prompts import ModelAnswer, PairAnswers, label

CONFIDENT = (Confidence(1, 0.9, -0.1, 0.8, 0.3),)
CHOICES = {"A": "north", "B": "south"}


def encode(text: str) -> Vector:
    """Texts with the same first letter are the same."""
    return np.eye(256, dtype=np.float32)[ord(text[0]) % 256]


def grades(prompt: EvaluationPrompt, small: str, large: str) -> tuple[float, float]:
    pair = PairAnswers(prompt.id, prompt.task, ModelAnswer(small, confidences=CONFIDENT), ModelAnswer(large))
    (labelled,) = label([prompt], {prompt.id: pair}, encode)
    return labelled.small, labelled.large


@pytest.mark.parametrize(
    ("metric", "answer", "small", "large", "expected"),
    [
        ("choice", "B", "B", "A. north", (1, 0)),
        ("choice", "B", " b", "(B) south", (0, 1)),
        ("choice", "B", "Because", "B", (0, 1)),
        ("number", "#### 1,200", "It is 1200.", "3 + 4 = 7", (1, 0)),
        ("number", "10", r"\(\boxed{\$10}\) hours for $200", r"so \boxed{200}", (1, 0)),
        ("number", "-2.50", "no number", "so it is -2.5", (0, 1)),
        ("text", "bayreuth germany", "Bayreuth", "The answer is Berlin.", (1, 0)),
        ("text", "The Beatles", "It was by the Beatles, I think", "beatles!", (1, 1)),
        ("text", "x", "", "y", (0, 0)),
        ("exact", '{"name":"play"}', ' {"name":"play"}', '{"name": "play"}', (1, 0)),
    ],
)
def test_answers_are_compared_with_the_reference(
    metric: str, answer: str, small: str, large: str, expected: tuple[int, int]
) -> None:
    choices = CHOICES if metric == "choice" else {}
    prompt = EvaluationPrompt(prompt="x", metric=metric, answer=answer, choices=choices)  # type: ignore[arg-type]
    assert grades(prompt, small, large) == expected


@pytest.mark.parametrize(
    ("small", "large", "agrees"),
    [
        ("The answer is 12.", "12", True),
        ("13", "12", False),
        ("Paris", "It is Paris", True),
        ("London", "It is Paris", False),
        ("Some quite different words", "Say it another way", True),  # by the encoder
    ],
)
def test_without_a_reference_the_large_model_s_answer_is_the_reference(small: str, large: str, agrees: bool) -> None:
    assert grades(EvaluationPrompt(prompt="x"), small, large) == (float(agrees), 1.0)
    assert grades(EvaluationPrompt(prompt="x", choices=CHOICES), "A", "A") == (1.0, 1.0)
    assert grades(EvaluationPrompt(prompt="x", choices=CHOICES), "neither", "neither") == (0.0, 1.0)


def test_an_answer_without_a_letter_counts_as_the_likeliest_choice() -> None:
    """Of the first token's alternatives."""
    answer = ModelAnswer("To determine where the", choices=(("To", -1.0), (" B", -1.5), ("A", -2.0)))
    assert chosen_letter(answer.text, ["A", "B"], answer.alternatives) == "B"
    assert chosen_letter("To determine", ["A", "B"]) is None


def test_texts_without_words_or_numbers() -> None:
    assert last_number("none") is None
    assert same_text("!", "?")
    assert not same_text("!", "word")


def test_rows_give_each_task_its_share_of_the_prompts() -> None:
    """A run that stopped early has two of four long answers, and both short ones."""
    asked = [EvaluationPrompt(prompt=f"{number}", task="long" if number < 4 else "short") for number in range(6)]
    pair = PairAnswers("", "", ModelAnswer("x", confidences=CONFIDENT), ModelAnswer("x"))
    rows = label(asked, {prompt.id: pair for prompt in asked[2:]}, None)
    assert [row.weight for row in rows] == pytest.approx([4 / 3, 4 / 3, 2 / 3, 2 / 3])
    assert [row.weight for row in label(asked, {prompt.id: pair for prompt in asked}, None)] == [1.0] * 6


def test_a_prompt_without_an_answer_is_left_out() -> None:
    prompt = EvaluationPrompt(prompt="x")
    assert label([prompt], {}, None) == []
    assert label([prompt], {prompt.id: PairAnswers(prompt.id, "x", ModelAnswer(""), ModelAnswer("a"))}, None) == []
