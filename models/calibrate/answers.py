"""The answers of both models, kept as JSON lines: a run that is killed goes on where it stopped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import msgspec

from router.types import Confidence

from ..catalog.artifact import ArtifactError
from ..signals.pair import ModelIdentity


class ModelAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a model answered.

    `confidences`: after each of the first tokens, as the engine reports it. `choices`: log-probabilities of the tokens
    that compete for the first position, where the prompt has choices.
    """

    text: str
    tokens: int = 0
    finish_reason: str = ""
    confidences: tuple[Confidence, ...] = ()
    choices: tuple[tuple[str, float], ...] = ()


class PairAnswers(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answers of both models to one prompt. `judged`: whether a judge finds the small one as good as the large."""

    id: str
    task: str
    small: ModelAnswer
    large: ModelAnswer
    judged: bool | None = None


class Pair(msgspec.Struct, frozen=True):
    """The pair that answered: the first line of the file."""

    small: ModelIdentity
    large: ModelIdentity


class AnswerLog:
    """One file of answers, with the pair that made them on its first line. Use as a context manager."""

    def __init__(self, path: Path, pair: Pair) -> None:
        """Open or create `path`; a last line that a killed run left incomplete is cut off.

        Raises:
            ArtifactError: the file holds answers of another pair, or no answers.
        """
        self.path = path
        self.rows: dict[str, PairAnswers] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = 0
        for number, line in enumerate(_complete_lines(path), start=1):
            try:
                if number == 1:
                    _check_pair(path, msgspec.json.decode(line, type=Pair), pair)
                else:
                    row = msgspec.json.decode(line, type=PairAnswers)
                    self.rows[row.id] = row
            except msgspec.DecodeError as error:
                raise ArtifactError(f"{path}:{number}: {error}. Delete the line, or the file to begin anew.") from error
            kept += len(line)
        self._file = path.open("ab")
        self._file.truncate(kept)
        if not kept:
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


def _complete_lines(path: Path) -> Iterator[bytes]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line


def _check_pair(path: Path, found: Pair, wanted: Pair) -> None:
    if found != wanted:
        raise ArtifactError(
            f"{path}: answers of {found.small.name} ({found.small.sha256[:12]}) and {found.large.name} "
            f"({found.large.sha256[:12]}), not of these weights. Name another --run folder."
        )
