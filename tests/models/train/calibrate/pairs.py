"""Synthetic pairs: prompts of two kinds, and the answers of models that are good at one of them."""

from __future__ import annotations

import random
from collections.abc import Sequence

from causeway_server.models.comparison.prompts import EvaluationPrompt
from causeway_server.router.types import Confidence
from causeway_train.calibrate.prompts import ModelAnswer, PairAnswers

EASY, HARD = "colour", "physics"
_SUBJECTS = {EASY: "the colour of a {}", HARD: "the orbital momentum of {} electrons"}


def prompts(count: int) -> list[EvaluationPrompt]:
    """Half of them easy, half hard; each has an answer of its own."""
    kinds = (EASY, HARD)
    return [
        EvaluationPrompt(
            prompt=f"What is {_SUBJECTS[kinds[number % 2]].format(number)}?",
            task=kinds[number % 2],
            answer=f"answer {number}",
            metric="text",
        )
        for number in range(count)
    ]


def answered(asked: Sequence[EvaluationPrompt], seed: int, *, telling: bool = True) -> dict[str, PairAnswers]:
    """The large model is nearly always right. The small one's confidence is the probability that it is right.

    Args:
        telling: False: both are right by chance, and confidence says nothing.
    """
    draw = random.Random(seed)
    rows = {}
    for prompt in asked:
        confidence = draw.uniform(0.5, 1.0) if prompt.task == EASY else draw.uniform(0.0, 0.5)
        small_right = draw.random() < (confidence if telling else 0.4)
        large_right = draw.random() < (0.97 if telling else 0.7)
        assert prompt.answer is not None
        rows[prompt.id] = PairAnswers(
            prompt.id,
            prompt.task,
            small=ModelAnswer(
                prompt.answer if small_right else "no idea",
                confidences=tuple(
                    Confidence(tokens, confidence, -1 + confidence, confidence, 1 - confidence, least=-1 + confidence)
                    for tokens in (1, 2, 3)
                ),
            ),
            large=ModelAnswer(prompt.answer if large_right else "no idea"),
        )
    return rows
