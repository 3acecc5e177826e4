"""The answers that a student learns, in its tokens: those that a reference or the teacher's own samples agree with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from causeway_server.models.comparison.prompts import EvaluationPrompt, is_right

from ..data.prompt_renderer import PromptRenderer
from ..evaluate.greedy import GreedyModel
from ..function_calls.dataset import is_held_out
from .teacher import TeacherAnswer, TeacherAnswers, TeacherToken
from .trainer import LearnedAnswer

SPLIT_SEED = "causeway-distill"
FINISHED = ("stop", "tool_calls")
_ANSWER = "answer"


def is_held_back(prompt: EvaluationPrompt) -> bool:
    """Return whether a prompt is held back from training: a tenth, by a hash of its text."""
    return is_held_out(prompt.question, SPLIT_SEED)


def agreed(prompt: EvaluationPrompt, answers: TeacherAnswers, least: float) -> TeacherAnswer | None:
    """Return the sample to learn, None if there is none that the prompt's reference or enough samples agree with.

    A sample that was cut off is never learned.

    Args:
        least: The share of the samples that must have the same text, where there is no reference.
    """
    whole = [one for one in answers.samples if one.finish_reason in FINISHED and one.text.strip()]
    if prompt.answer is not None:
        return next((one for one in whole if is_right(prompt, one.text)), None)
    groups: dict[str, list[TeacherAnswer]] = {}
    for one in whole:
        groups.setdefault(" ".join(one.text.split()).casefold(), []).append(one)
    largest = max(groups.values(), key=len, default=[])
    return largest[0] if largest and len(largest) >= least * len(answers.samples) else None


class ExampleEncoder:
    """Encodes prompts and answers with a student's tokenizer and chat template. Use as a context manager.

    Args:
        longest: Tokens of a prompt with its answer; longer examples are left out.
    """

    def __init__(self, student: Path, longest: int) -> None:
        self._model = GreedyModel(student, slots=1, context=256)
        self._renderer = PromptRenderer(self._model.chat_template)
        self._longest = longest
        self._end = self._end_of_turn()
        self._ids: Mapping[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._model.close()

    @property
    def vocabulary(self) -> int:
        """The number of the student's tokens."""
        return self._model.vocabulary

    def _end_of_turn(self) -> int:
        """Return the token that ends an answer in the chat template, else the model's own end of a turn."""
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
        _, _, rest = self._renderer.render(turns).partition(_ANSWER)
        after = self._model.tokenize(rest)
        return after[0] if after and self._model.ends(after[0]) else self._model.end_token

    def encode(self, question: str, answer: TeacherAnswer) -> LearnedAnswer | None:
        """Return the example; None if it is too long."""
        prompt = tuple(self._model.tokenize(self._renderer.user(question)))
        text = answer.text.strip()
        tokens = (*self._model.tokenize(text, special=False), self._end)
        if len(prompt) + len(tokens) > self._longest:
            return None
        return LearnedAnswer(prompt, tokens, tuple(self._soft(tokens, answer.tokens)))

    def _soft(self, tokens: Sequence[int], teacher: Sequence[TeacherToken]) -> Iterator[tuple[tuple[int, float], ...]]:
        """Yield the teacher's probabilities at each token, if it cuts the answer into the same tokens."""
        pieces = [self._model.piece(token).decode(errors="replace") for token in tokens[:-1]]
        if not teacher or [one.text for one in teacher[: len(pieces)]] != pieces:
            return
        if not self._ids:
            texts = (self._model.piece(token).decode(errors="replace") for token in range(self._model.vocabulary))
            self._ids = {text: token for token, text in enumerate(texts) if text}
        for one in teacher[: len(pieces)]:
            known = {self._ids[text]: math.exp(logprob) for text, logprob in one.top if text in self._ids}
            total = sum(known.values())
            yield tuple((token, chance / total) for token, chance in known.items() if chance > 0)
        yield ()  # the end


def make_examples(
    prompts: Sequence[EvaluationPrompt], answers: Mapping[str, TeacherAnswers], encoder: ExampleEncoder, least: float
) -> list[LearnedAnswer]:
    """Return the examples of the prompts that have an answer to learn."""
    chosen = ((prompt, agreed(prompt, answers[prompt.id], least)) for prompt in prompts if prompt.id in answers)
    made = (encoder.encode(prompt.question, answer) for prompt, answer in chosen if answer is not None)
    return [example for example in made if example is not None]
