"""Utterances with an intent and slots, as JSON lines, and which of them are held back.

A row: `{"text": …, "intent": …, "slots": [[name, value], …], "split": …}`; `slots` and `split` may be missing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from ..catalog.artifact import ArtifactError

INTENT_SOURCES = ("hwu64", "snips2017", "clinc150", "banking77")
SPLIT_SEED = "causeway-2026"
T = TypeVar("T")
HELD_OUT_SHARE = 0.1  # share of rows


class Row(msgspec.Struct, frozen=True):
    text: str
    intent: str
    slots: tuple[tuple[str, str], ...] = ()
    split: str = "train"
    source: str = ""

    @property
    def clean(self) -> Row:
        """White space at the ends is noise of the collection, and so is the same around a value."""
        slots = tuple((name, value.strip()) for name, value in self.slots)
        return msgspec.structs.replace(self, text=self.text.strip(), slots=slots)


class Question(msgspec.Struct, frozen=True):
    """A prompt of the routing data: no intent, always outside the assistants' catalogue."""

    prompt: str


def read_rows(path: Path, source: str = "") -> tuple[Row, ...]:
    """All rows of one file; `source` defaults to the file's name. Raises ArtifactError with file and line."""
    return tuple(msgspec.structs.replace(row, source=source or path.stem).clean for row in _decode_lines(path, Row))


def read_questions(path: Path) -> tuple[Question, ...]:
    return tuple(_decode_lines(path, Question))


def is_held_out(text: str, seed: str = SPLIT_SEED, share: float = HELD_OUT_SHARE) -> bool:
    """Whether a text is kept for validation: a hash of the text decides, so that doubles land on the same side."""
    digest = hashlib.sha256(f"{seed}\0{text.strip().lower()}".encode()).digest()
    return int.from_bytes(digest[:4], "big") < share * 2**32


def is_validation_row(row: Row) -> bool:
    """CLINC150 brings its own validation split; of the others a seeded tenth is held back."""
    if row.source == "clinc150":
        return row.split.endswith("val")
    return is_held_out(row.text)


def _decode_lines(path: Path, kind: type[T]) -> Iterator[T]:
    decoder = msgspec.json.Decoder(kind)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                raise ArtifactError(f"{path}:{number}: {error}") from error
