"""How good both answers to a prompt are: compared with the reference answer, or with the large model's answer.

With a reference each answer is right (1) or wrong (0). Without one the large model's answer is the reference: it counts
1, and so does the small model's answer if it agrees, or if a judge finds it as good.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from router.types import Confidence

from ..signals.pair import Encode
from .prompts import CalibrationPrompt, ModelAnswer, PairAnswers, last_number

F1_RIGHT = 0.5  # word overlap from which a text counts as the reference
SIMILAR = 0.8  # cosine of the encoder's vectors from which two free texts agree
LEAST_CHOICES = 2
_CHOICE = re.compile(r"^\s*\(?([A-H])[.):]\s", re.MULTILINE)
_BARE_LETTER = re.compile(r"^\W*([A-H])(?:[.):,]|\s*$)")  # "B. below", but not "A good way"
_LETTER = re.compile(r"^\W*([A-Z])\b")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation, " "))


class LabelledAnswer(msgspec.Struct, frozen=True):
    """A prompt, the quality of both answers (0 to 1), and the confidence of the small one after each first token.

    `chance` is the quality of guessing, where the prompt has choices. `confidences_end`: the last of `confidences`
    covers the end of the answer. `weight`: how many prompts the row stands for, in the mean 1.
    """

    text: str
    task: str
    small: float
    large: float
    confidences: tuple[Confidence, ...]
    chance: float = 0.0
    confidences_end: bool = True
    weight: float = 1.0

    @property
    def enough(self) -> bool:
        """Whether the small model's answer is good enough: the large model's is not better."""
        return self.small >= self.large


def label(
    prompts: Sequence[CalibrationPrompt], answers: Mapping[str, PairAnswers], encode: Encode | None
) -> list[LabelledAnswer]:
    """Grade the answers to each prompt that has some.

    Tasks with long answers have fewer of their prompts answered when a run stops. The weights of the rows give each
    task its share of `prompts` back.

    Args:
        answers: by the prompt's id.
        encode: the sentence encoder, for free texts without reference; None: only equal texts agree.
    """
    rows = []
    for prompt in prompts:
        pair = answers.get(prompt.id)
        if pair is None or not pair.small.confidences:
            continue
        small, large = _grades(prompt, pair, encode)
        chance = 1 / len(prompt.choices) if prompt.choices else 0.0
        rows.append(LabelledAnswer(prompt.question, prompt.task, small, large, pair.small.confidences, chance))
    return _weighted(rows, Counter(prompt.task for prompt in prompts))


def chosen_letter(answer: ModelAnswer, letters: Sequence[str]) -> str | None:
    """Return the choice that an answer begins with, or else the likeliest one among its first token's alternatives."""
    if (found := _LETTER.match(answer.text)) and found[1] in letters:
        return found[1]
    return next((token.strip() for token, _ in answer.choices if token.strip() in letters), None)


def same_text(text: str, reference: str) -> bool:
    """Return whether a text is the reference, contains it, or shares enough of its words, as in SQuAD."""
    words, wanted = _words(text), _words(reference)
    if not words or not wanted:
        return words == wanted
    if f" {' '.join(wanted)} " in f" {' '.join(words)} ":
        return True
    common = sum((Counter(words) & Counter(wanted)).values())
    return 2 * common / (len(words) + len(wanted)) >= F1_RIGHT


def _weighted(rows: Sequence[LabelledAnswer], wanted: Mapping[str, int]) -> list[LabelledAnswer]:
    """Weigh the rows of each task so that the tasks have the proportions of `wanted`."""
    answered = Counter(row.task for row in rows)
    scale = len(rows) / max(1, sum(wanted[task] for task in answered))
    return [msgspec.structs.replace(row, weight=scale * wanted[row.task] / answered[row.task]) for row in rows]


def _grades(prompt: CalibrationPrompt, pair: PairAnswers, encode: Encode | None) -> tuple[float, float]:
    if prompt.answer is not None:
        return float(_is_right(prompt, pair.small)), float(_is_right(prompt, pair.large))
    agreed = _agree(prompt, pair, encode) if pair.judged is None else pair.judged
    return float(agreed), 1.0


def _is_right(prompt: CalibrationPrompt, answer: ModelAnswer) -> bool:
    assert prompt.answer is not None
    if prompt.metric == "choice":
        return chosen_letter(answer, list(prompt.choices)) == prompt.answer
    if prompt.metric == "number":
        number = last_number(answer.text)
        return number is not None and number == last_number(prompt.answer)
    return same_text(answer.text, prompt.answer)


def answers_agree(question: str, small: str, large: str, encode: Encode) -> bool:
    """Return whether the small model's answer agrees with the large one's, where nothing but the texts is known.

    Where the question lists choices the letters are compared, if both answers begin with one.
    """
    letters = _CHOICE.findall(question)
    chosen = [found[1] for text in (small, large) if (found := _BARE_LETTER.match(text)) and found[1] in letters]
    if len(letters) >= LEAST_CHOICES and len(chosen) == 2:
        return chosen[0] == chosen[1]
    prompt = CalibrationPrompt(prompt=question)
    return _agree(prompt, PairAnswers("", "", ModelAnswer(small), ModelAnswer(large)), encode)


def _agree(prompt: CalibrationPrompt, pair: PairAnswers, encode: Encode | None) -> bool:
    """Compare both answers: (1) by choice, (2) by number where both are little else, (3) by text, (4) by embedding."""
    small, large = pair.small, pair.large
    if prompt.choices:  # (1)
        letters = list(prompt.choices)
        return chosen_letter(small, letters) == chosen_letter(large, letters) is not None
    if prompt.metric == "number" or _is_number(large.text):  # (2)
        return last_number(small.text) == last_number(large.text) is not None
    if same_text(small.text, large.text):  # (3)
        return True
    return encode is not None and float(np.dot(encode(small.text), encode(large.text))) >= SIMILAR  # (4)


def _is_number(text: str) -> bool:
    return last_number(text) is not None and not any(word.isalpha() and len(word) > 3 for word in _words(text))


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()
