"""A third model that compares two answers, for prompts without a reference."""

from __future__ import annotations

from .answers import PairAnswers
from .collect import Answerer
from .label import chosen_letter
from .prompts import CalibrationPrompt

_QUESTION = """Compare two answers to a request. Judge only whether they are correct and do what was asked for.

Request:
{prompt}

First answer:
{first}

Second answer:
{second}"""
_CHOICES = {"A": "The first answer is better.", "B": "The second answer is better.", "C": "Both are equally good."}


class AnswerJudge:
    """Asks `model` which answer is better."""

    def __init__(self, model: Answerer) -> None:
        self._model = model

    async def as_good(self, prompt: CalibrationPrompt, answers: PairAnswers) -> bool:
        """Return whether the small model's answer is as good; an unclear judgement counts against it.

        Raises:
            BackendError: the model is gone.
        """
        # Judges prefer one position: half of the prompts, by their digest, have the small model's answer first.
        swapped = int(prompt.id, 16) % 2 == 1
        texts = [answers.small.text, answers.large.text]
        first, second = reversed(texts) if swapped else texts
        question = _QUESTION.format(prompt=prompt.question, first=first, second=second)
        comparison = CalibrationPrompt(prompt=question, metric="choice", answer="A", choices=_CHOICES)
        letter = chosen_letter(await self._model.answer(comparison), list(_CHOICES))
        return letter in ("C", "B" if swapped else "A")
