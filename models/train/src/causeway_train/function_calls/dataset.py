"""Utterances with an intent and slots, as JSON lines, and the held-out split.

A row: `{"text": …, "intent": …, "slots": [[name, value], …], "split": …}`; `slots` and `split` are optional.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from causeway_server.models.catalog.artifact import ArtifactError

INTENT_SOURCES = ("hwu64", "snips2017", "clinc150", "banking77")
SPLIT_SEED = "causeway-2026"
T = TypeVar("T")
HELD_OUT_SHARE = 0.1  # of the rows


class Row(msgspec.Struct, frozen=True):
    """One labelled utterance."""

    text: str
    intent: str
    slots: tuple[tuple[str, str], ...] = ()
    split: str = "train"
    source: str = ""  # the data set

    @property
    def stripped(self) -> Row:
        """The row without white space around its text and its values."""
        slots = tuple((name, value.strip()) for name, value in self.slots)
        return msgspec.structs.replace(self, text=self.text.strip(), slots=slots)


class Question(msgspec.Struct, frozen=True):
    """A prompt of the routing data: no intent, always outside the assistants' catalogue."""

    prompt: str


def read_rows(path: Path, source: str = "") -> tuple[Row, ...]:
    """Read all rows of one file.

    Args:
        path: JSON lines.
        source: the data set; by default the file's name.

    Raises:
        ArtifactError: a line is malformed; the message has file and line.
    """
    return tuple(msgspec.structs.replace(row, source=source or path.stem).stripped for row in _decode_lines(path, Row))


def read_questions(path: Path) -> tuple[Question, ...]:
    """Read the routing prompts of one file; see `read_rows`."""
    return tuple(_decode_lines(path, Question))


def is_held_out(text: str, seed: str = SPLIT_SEED, share: float = HELD_OUT_SHARE) -> bool:
    """Return whether a text is held out for validation. A hash of the text decides, so duplicates stay together."""
    digest = hashlib.sha256(f"{seed}\0{text.strip().lower()}".encode()).digest()
    return int.from_bytes(digest[:4], "big") < share * 2**32


def is_validation_row(row: Row) -> bool:
    """Return whether a row is for validation: by CLINC150's own split, or a seeded tenth of the other data sets."""
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
