"""The JSON-lines files of a calibration: prompts, each with a reference answer if there is one, and the answers of both
models.

A pair is calibrated on the prompts. The answers of both models are stored, so that a run that was killed resumes.

`label` grades both answers. With a reference each answer is right (1) or wrong (0). Without one the large model's
answer is the reference: it counts 1, and so does the small model's answer if it agrees, or if a judge finds it as good.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Self, TypeVar

import msgspec

from causeway_server.models.catalog.artifact import ArtifactError, DataSource
from causeway_server.models.signals.agreement import last_number, same_text, texts_agree
from causeway_server.models.signals.pair import Encode, ModelIdentity
from causeway_server.router.types import Confidence

Metric = Literal["choice", "number", "text", "none"]
Line = TypeVar("Line")
LONG_TURN = 5  # prompts with long answers take every fifth turn, so that the others get on
_LONG_TOKENS = 64
_BAD_LINES_SHOWN = 5
_INSTRUCTIONS: dict[Metric, str] = {
    "choice": "Answer with the letter of the right choice and nothing else.",
    "number": "Work it out in a few short steps. End with the answer as a number.",
    "text": "Answer with a name or a few words, and nothing else.",
    "none": "",
}
_ANSWER_TOKENS: dict[Metric, int] = {"choice": 4, "number": 256, "text": 24, "none": 256}


class ModelAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model's answer. `confidences`: the engine's confidence after each of the first tokens. `choices`:
    log-probabilities of the tokens that compete for the first position, if the prompt has choices.
    """

    text: str
    tokens: int = 0
    finish_reason: str = ""
    confidences: tuple[Confidence, ...] = ()
    choices: tuple[tuple[str, float], ...] = ()


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
            f"{path}: answers of {found.small.name} ({found.small.sha256[:12]}) and {found.large.name} "
            f"({found.large.sha256[:12]}), not of these weights. Name another --run-dir folder."
        )


class CalibrationPrompt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line of a prompts file. `metric`: the way to compare an answer with `answer`: by the letter of one of
    `choices`, by the last number, or by the text. Without `answer` the large model's answer is the reference.
    """

    prompt: str
    task: str = "prompts"
    answer: str | None = None
    metric: Metric = "none"
    choices: dict[str, str] = {}

    @property
    def id(self) -> str:
        """A digest of the text that both models are asked."""
        return hashlib.sha256(f"{self.task}\0{self.question}".encode()).hexdigest()[:16]

    @property
    def question(self) -> str:
        """The text of the user message."""
        choices = "".join(f"\n{letter}. {text}" for letter, text in self.choices.items())
        instruction = _INSTRUCTIONS[self.metric]
        return f"{self.prompt}{choices}\n{instruction}" if instruction else f"{self.prompt}{choices}"

    @property
    def answer_tokens(self) -> int:
        """The maximum number of tokens of an answer."""
        return _ANSWER_TOKENS[self.metric]


def read_prompts(files: Sequence[Path]) -> list[CalibrationPrompt]:
    """Read prompts; duplicates are read once.

    Raises:
        ArtifactError: Lines are not prompts, with file, line and reason; or there is no prompt.
    """
    prompts: dict[str, CalibrationPrompt] = {}
    for prompt in read_lines(files, _parse, '{"prompt": "..."}'):
        prompts.setdefault(prompt.id, prompt)
    return list(prompts.values())


def read_lines(files: Sequence[Path], parse: Callable[[bytes], Line], example: str) -> list[Line]:
    """Read JSON lines; blank ones are skipped.

    Args:
        parse: Converts a line; raises ValueError or DecodeError.
        example: A usable line, for the message.

    Raises:
        ArtifactError: Lines that `parse` refuses, with file, line and reason; or there is no line at all.
    """
    found: list[Line] = []
    faults: list[str] = []
    for path in files:
        try:
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise ArtifactError(f"{path}: {error.strerror}") from error
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                found.append(parse(line))
            except (ValueError, msgspec.DecodeError) as error:
                faults.append(f"{path}:{number}: {error}")
    if faults:
        rest = len(faults) - _BAD_LINES_SHOWN
        more = [f"and {rest} more lines"] if rest > 0 else []
        raise ArtifactError(
            "\n".join([*faults[:_BAD_LINES_SHOWN], *more, f"Correct or delete these lines; each is {example}."])
        )
    if not found:
        raise ArtifactError(f"{', '.join(map(str, files))}: the file has no lines; a line is, for example, {example}")
    return found


def read_sources(path: Path) -> list[DataSource]:
    """Read the sources that a set of prompts is attributed to.

    Raises:
        ArtifactError: The file is invalid, see `read_lines`.
    """
    decoder = msgspec.json.Decoder(DataSource)
    return read_lines([path], decoder.decode, '{"name": "...", "licence": "...", "attribution": "..."}')


def collection_order(prompts: Sequence[CalibrationPrompt], seed: int) -> list[CalibrationPrompt]:
    """Return the prompts in a seeded order in which the tasks alternate, so that the first prompts are always a fair
    sample.

    Tasks with long answers come once in `LONG_TURN` turns while other tasks have prompts left.
    """
    draw = random.Random(seed)
    queues: dict[str, list[CalibrationPrompt]] = {}
    for prompt in prompts:
        queues.setdefault(prompt.task, []).append(prompt)
    for queue in queues.values():
        draw.shuffle(queue)
    order: list[CalibrationPrompt] = []
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


def _parse(line: bytes) -> CalibrationPrompt:
    """Return the prompt of a line. Raises ValueError or DecodeError if it is not a usable prompt."""
    prompt = msgspec.json.decode(line, type=CalibrationPrompt)
    if not prompt.prompt.strip():
        raise ValueError("`prompt` is empty")
    if (prompt.metric == "none") != (prompt.answer is None):
        raise ValueError("`answer` and `metric` (choice, number or text) belong together")
    if prompt.metric == "choice" and prompt.answer not in prompt.choices:
        raise ValueError(f"`answer` is {prompt.answer!r}, which is not among the `choices`")
    if prompt.metric == "number" and last_number(prompt.answer or "") is None:
        raise ValueError(f"`answer` is {prompt.answer!r}, which has no number")
    return prompt


_LETTER = re.compile(r"^\W*([A-Z])\b")


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
    prompts: Sequence[CalibrationPrompt], answers: Mapping[str, PairAnswers], encode: Encode | None
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


def chosen_letter(answer: ModelAnswer, letters: Sequence[str]) -> str | None:
    """Return the choice that an answer begins with, or else the likeliest one among its first token's alternatives."""
    if (found := _LETTER.match(answer.text)) and found[1] in letters:
        return found[1]
    return next((token.strip() for token, _ in answer.choices if token.strip() in letters), None)


def _weighted(rows: Sequence[LabelledAnswer], wanted: Mapping[str, int]) -> list[LabelledAnswer]:
    """Weight the rows so that each task has its proportion in `wanted`."""
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


def _agree(prompt: CalibrationPrompt, pair: PairAnswers, encode: Encode | None) -> bool:
    """Compare both answers by choice or by number if the prompt asks for one, else by their texts."""
    small, large = pair.small, pair.large
    if prompt.choices:
        letters = list(prompt.choices)
        return chosen_letter(small, letters) == chosen_letter(large, letters) is not None
    if prompt.metric == "number":
        return last_number(small.text) == last_number(large.text) is not None
    return texts_agree(small.text, large.text, encode)
