"""The training data: rows and questions, with their held-back parts."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ..function_calls.dataset import INTENT_SOURCES, Row, is_held_out, is_validation_row, read_questions, read_rows
from ..function_calls.intents import OUT_OF_SCOPE, argument_name, functions_for


class Corpus(msgspec.Struct, frozen=True):
    """All rows and questions, split into training and held-back parts."""

    train: tuple[Row, ...]
    validation: tuple[Row, ...]
    questions: tuple[str, ...]
    held_questions: tuple[str, ...]
    pseudo_labelled: tuple[Row, ...] = ()  # rows with arguments by a teacher (pseudo_labels.py)

    @classmethod
    def read(cls, data: Path) -> Corpus:
        """Read `intents/*.jsonl` and `routing/*.jsonl` under `data`; missing files are skipped."""
        rows = [row for name in INTENT_SOURCES for row in _rows(data / "intents" / f"{name}.jsonl")]
        files = sorted((data / "routing").glob("*.jsonl"))
        questions = [question.prompt for path in files for question in read_questions(path)]
        return cls(
            train=tuple(row for row in rows if not is_validation_row(row)),
            validation=tuple(row for row in rows if is_validation_row(row)),
            questions=tuple(text for text in questions if not is_held_out(text)),
            held_questions=tuple(text for text in questions if is_held_out(text)),
        )

    def functions(self) -> list[str]:
        """Return the names of all functions in the training rows, and out_of_scope."""
        names = {name for row in self.train for name in functions_for(row.source, row.intent)}
        return sorted(names | {OUT_OF_SCOPE})

    def arguments(self) -> list[str]:
        return sorted({argument_name(slot) for row in self.train for slot, _ in row.slots})

    def tokenizer_texts(self) -> list[str]:
        """Return the texts on which the tokenizer is trained: requests, and argument values as they stand at the start
        of a JSON string.
        """
        values = [value for row in self.train for _, value in row.slots]
        return [row.text for row in self.train] + values + [text[:200] for text in self.questions[::4]]


def _rows(path: Path) -> tuple[Row, ...]:
    return read_rows(path) if path.is_file() else ()
