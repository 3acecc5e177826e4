"""The order of a calibration's prompts, and the answers of both models as JSON lines.

The answers of both models are stored, so that a run that was killed resumes.

`label` grades both answers. With a reference each answer is right (1) or wrong (0). Without one the large model's
answer is the reference: it counts 1, and so does the small model's answer if it agrees, or if a judge finds it as good.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import msgspec

from causeway_server.models.catalog.artifact import ArtifactError, DataSource
from causeway_server.models.comparison.prompts import EvaluationPrompt, chosen_letter, is_right, read_lines
from causeway_server.models.signals.agreement import last_number, texts_agree
from causeway_server.models.signals.pair import Encode, ModelIdentity
from causeway_server.router.types import Confidence

LONG_TURN = 5  # prompts with long answers take every fifth turn, so that the others get on
_LONG_TOKENS = 64


class ModelAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model's answer. `confidences`: the engine's confidence after each of the first tokens. `choices`:
    log-probabilities of the tokens that compete for the first position, if the prompt has choices.
    """

    text: str
    tokens: int = 0
    finish_reason: str = ""
    confidences: tuple[Confidence, ...] = ()
    choices: tuple[tuple[str, float], ...] = ()

    @property
    def alternatives(self) -> tuple[str, ...]:
        """The tokens of `choices`, the likeliest first."""
        return tuple(token for token, _ in self.choices)


class PairAnswers(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answers of both models to one prompt. `judged`: whether a judge model finds the small model's answer as good
    as the large model's.
    """

    id: str
    task: str
    small: ModelAnswer
    large: ModelAnswer
    judged: bool | None = None


class Pair(msgspec.Struct, frozen=True):
    """The two models whose answers a file holds: the first line of the file."""

    small: ModelIdentity
    large: ModelIdentity


class AnswerLog:
    """A file of answers, with the pair of models on its first line. Use it as a context manager."""

    def __init__(self, path: Path, pair: Pair) -> None:
        """Open or create `path`; a last line that a killed run left incomplete is cut off.

        Raises:
            ArtifactError: The file holds answers of another pair, or no answers.
        """
        self.path = path
        self.rows: dict[str, PairAnswers] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        lines = path.read_bytes().split(b"\n")[:-1]
        for number, line in enumerate(lines, start=1):
            try:
                if number == 1:
                    _check_pair(path, msgspec.json.decode(line, type=Pair), pair)
                else:
                    row = msgspec.json.decode(line, type=PairAnswers)
                    self.rows[row.id] = row
            except msgspec.DecodeError as error:
                raise ArtifactError(
                    f"{path}:{number}: {error}. Delete the line, or delete the file to start again."
                ) from error
        self._file = path.open("ab")
        self._file.truncate(sum(len(line) + 1 for line in lines))
        if not lines:
            self._write(pair)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, row: PairAnswers) -> None:
        """Add a row; it is on the disk when this returns."""
        self.rows[row.id] = row
        self._write(row)

    def _write(self, value: msgspec.Struct) -> None:
        self._file.write(msgspec.json.encode(value) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def _check_pair(path: Path, found: Pair, wanted: Pair) -> None:
    if found != wanted:
        raise ArtifactError(
            f"{path} has answers of {found.small.name} ({found.small.sha256[:12]}) and {found.large.name} "
            f"({found.large.sha256[:12]}), and not of the weights of this run. Name another --run-dir folder."
        )


def read_sources(path: Path) -> list[DataSource]:
    """Read the sources that a set of prompts is attributed to.

    Raises:
        ArtifactError: The file is invalid, see `read_lines`.
    """
    decoder = msgspec.json.Decoder(DataSource)
    return read_lines([path], decoder.decode, '{"name": "...", "licence": "...", "attribution": "..."}')


def collection_order(prompts: Sequence[EvaluationPrompt], seed: int) -> list[EvaluationPrompt]:
    """Return the prompts in a seeded order in which the tasks alternate, so that the first prompts are always a fair
    sample.

    Tasks with long answers come once in `LONG_TURN` turns while other tasks have prompts left.
    """
    draw = random.Random(seed)
    queues: dict[str, list[EvaluationPrompt]] = {}
    for prompt in prompts:
        queues.setdefault(prompt.task, []).append(prompt)
    for queue in queues.values():
        draw.shuffle(queue)
    order: list[EvaluationPrompt] = []
    turn = 0
    while queues:
        short = [task for task, queue in queues.items() if queue[-1].answer_tokens <= _LONG_TOKENS]
        turn_of = list(queues) if not short or turn % LONG_TURN == 0 else short
        for task in turn_of:
            order.append(queues[task].pop())
            if not queues[task]:
                del queues[task]
        turn += 1
    return order


class LabelledAnswer(msgspec.Struct, frozen=True):
    """A prompt, the quality of both answers (0 to 1), and the small model's confidence after each of its first tokens.

    `chance` is the quality of guessing, where the prompt has choices. `confidences_end`: the last of `confidences`
    covers the end of the answer. `weight`: the number of prompts that the row represents, 1 on average.
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
    prompts: Sequence[EvaluationPrompt], answers: Mapping[str, PairAnswers], encode: Encode | None
) -> list[LabelledAnswer]:
    """Grade the answers to every prompt that has answers.

    When a run stops early, fewer prompts of tasks with long answers are answered. The rows' weights restore each task's
    share of `prompts`.

    Args:
        answers: The answers by the prompt's id.
        encode: The sentence encoder, for free texts without reference; None: only equal texts agree.
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


def _weighted(rows: Sequence[LabelledAnswer], wanted: Mapping[str, int]) -> list[LabelledAnswer]:
    """Weight the rows so that each task has its proportion in `wanted`."""
    answered = Counter(row.task for row in rows)
    scale = len(rows) / max(1, sum(wanted[task] for task in answered))
    return [msgspec.structs.replace(row, weight=scale * wanted[row.task] / answered[row.task]) for row in rows]


def _grades(prompt: EvaluationPrompt, pair: PairAnswers, encode: Encode | None) -> tuple[float, float]:
    if prompt.answer is not None:
        small, large = (is_right(prompt, one.text, one.alternatives) for one in (pair.small, pair.large))
        return float(small), float(large)
    agreed = _agree(prompt, pair, encode) if pair.judged is None else pair.judged
    return float(agreed), 1.0


def _agree(prompt: EvaluationPrompt, pair: PairAnswers, encode: Encode | None) -> bool:
    """Compare both answers by choice or by number if the prompt asks for one, else by their texts."""
    small, large = pair.small, pair.large
    if prompt.choices:
        letters = list(prompt.choices)
        chosen, wanted = (chosen_letter(one.text, letters, one.alternatives) for one in (small, large))
        return chosen == wanted is not None
    if prompt.metric == "number":
        return last_number(small.text) == last_number(large.text) is not None
    return texts_agree(small.text, large.text, encode)
