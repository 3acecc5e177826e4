"""Pseudo-labels: the teacher's answers to texts without slot labels become rows for the student.

Sequence-level distillation (Kim and Rush 2016, arXiv 1606.07947).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..evaluate.greedy import Answer, GreedyModel
from ..function_calls.call import expected_call, parse_call, slot_spans
from ..function_calls.dataset import Row
from ..function_calls.intents import CLINC_MERGED, LABELLED, functions_for, is_device_function
from .prompt_renderer import PromptRenderer

MIN_LOGPROB = -0.35  # least log probability of every token of a label (70 %)


def unlabelled(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of device functions without argument labels: CLINC150's merged intents."""
    return [
        row
        for row in rows
        if row.source == "clinc150" and any(is_device_function(name) for name in CLINC_MERGED.get(row.intent, ()))
    ]


def label(teacher: Path, rows: Sequence[Row], threads: int = 2) -> list[Row]:
    """Return rows labelled by the GGUF `teacher`.

    Labels that are uncertain, name another function than the row's or are not copied from the text are dropped.
    """
    with GreedyModel(teacher, threads=threads) as model:
        prompter = PromptRenderer(model.chat_template)
        answers = model.answers([model.tokenize(prompter.user(row.text)) for row in rows])
    labelled = (_pseudo_label(row, answer) for row, answer in zip(rows, answers, strict=True))
    return [row for row in labelled if row is not None]


def save_rows(rows: Sequence[Row], path: Path) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


def _pseudo_label(row: Row, answer: Answer) -> Row | None:
    call = parse_call(answer.text)
    if call is None or min(answer.logprobs) < MIN_LOGPROB or call.name not in functions_for(row.source, row.intent):
        return None
    slots = tuple(
        (name, value)
        for name, values in call.arguments.items()
        for value in (values if isinstance(values, list) else [values])
    )
    made = Row(text=row.text, intent=call.name, slots=slots, source=LABELLED)
    return made if slot_spans(made) is not None and expected_call(made) == call else None
