"""Files of prompts as JSON lines, each with a reference answer if there is one, and the grading of answers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from ..catalog.artifact import ArtifactError
from ..signals.agreement import last_number, same_text

Metric = Literal["choice", "number", "text", "exact", "none"]
Line = TypeVar("Line")
_LETTER = re.compile(r"^\W*([A-Z])\b")
_BAD_LINES_SHOWN = 5
_INSTRUCTIONS: dict[Metric, str] = {
    "choice": "Answer with the letter of the right choice and nothing else.",
    "number": "Work it out in a few short steps. End with the answer as a number.",
    "text": "Answer with a name or a few words, and nothing else.",
    "exact": "",
    "none": "",
}
_ANSWER_TOKENS: dict[Metric, int] = {"choice": 4, "number": 256, "text": 24, "exact": 256, "none": 256}


class EvaluationPrompt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line of a prompts file. `metric` compares answers with `answer` (else another model's): by the letter of one of
    `choices`, the last number, the words of the text, or the exact text, which adds no instruction.
    """

    prompt: str
    task: str = "prompts"
    answer: str | None = None
    metric: Metric = "none"
    choices: dict[str, str] = {}

    @property
    def id(self) -> str:
        """A digest of the text that a model is asked."""
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


def read_prompts(files: Sequence[Path]) -> list[EvaluationPrompt]:
    """Read prompts, duplicates once. Raises ArtifactError, with file, line and reason, or without any prompt."""
    prompts: dict[str, EvaluationPrompt] = {}
    for prompt in read_lines(files, _parse, '{"prompt": "..."}'):
        prompts.setdefault(prompt.id, prompt)
    return list(prompts.values())


def read_lines(files: Sequence[Path], parse: Callable[[bytes], Line], example: str) -> list[Line]:
    """Read JSON lines; blank ones are skipped.

    `parse` converts a line, or raises ValueError or DecodeError; `example`: a usable line, for the message. Raises
    ArtifactError, with file, line and reason, for lines that `parse` refuses, or if there are none.
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


def _parse(line: bytes) -> EvaluationPrompt:
    """Return the prompt of a line. Raises ValueError or DecodeError if it is not a usable prompt."""
    prompt = msgspec.json.decode(line, type=EvaluationPrompt)
    if not prompt.prompt.strip():
        raise ValueError("`prompt` is empty")
    if (prompt.metric == "none") != (prompt.answer is None):
        raise ValueError("`answer` and `metric` (choice, number, text or exact) must be given together")
    if prompt.metric == "choice" and prompt.answer not in prompt.choices:
        raise ValueError(f"`answer` is {prompt.answer!r}, which is not among the `choices`")
    if prompt.metric == "number" and last_number(prompt.answer or "") is None:
        raise ValueError(f"`answer` is {prompt.answer!r}, which has no number")
    return prompt


def chosen_letter(text: str, letters: Sequence[str], alternatives: Sequence[str] = ()) -> str | None:
    """Return the choice that an answer begins with, else the first of `alternatives`, the likeliest first tokens."""
    if (found := _LETTER.match(text)) and found[1] in letters:
        return found[1]
    return next((token.strip() for token in alternatives if token.strip() in letters), None)


def is_right(prompt: EvaluationPrompt, text: str, alternatives: Sequence[str] = ()) -> bool:
    """Compare an answer with the prompt's reference, which must be there. `alternatives`: as in `chosen_letter`."""
    assert prompt.answer is not None
    if prompt.metric == "choice":
        return chosen_letter(text, list(prompt.choices), alternatives) == prompt.answer
    if prompt.metric == "number":
        number = last_number(text)
        return number is not None and number == last_number(prompt.answer)
    return text.strip() == prompt.answer.strip() if prompt.metric == "exact" else same_text(text, prompt.answer)
