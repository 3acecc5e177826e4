"""Measure an assistant on labelled utterances: right function, exact call, valid JSON, and how well it refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..chat.template import PromptRenderer
from ..function_calls.call import score_answer
from ..function_calls.dataset import Row
from ..function_calls.grammar import ANSWER_TOKENS, call_grammar
from ..function_calls.intents import is_device_row, is_refusable
from .greedy import Answer, GreedyModel
from .report import EvaluationReport, GroupResult

REFUSED = 0.5  # probability of the refusal token from which an answer is one


def evaluate(
    path: Path,
    rows: Sequence[Row],
    *,
    grammar: bool = False,
    threads: int = 2,
    tick: Callable[[int], None] = lambda count: None,
) -> EvaluationReport:
    """Greedy answers of the GGUF at `path` to every row, scored. `tick` gets the number of rows done since the last
    call. With `grammar`, each is held to the grammar of its utterance, as the engine holds it.
    """
    answers: list[Answer] = []
    with GreedyModel(path, threads=threads) as model:
        prompter = PromptRenderer(model.chat_template)
        for start in range(0, len(rows), 64):
            part = rows[start : start + 64]
            prompts = [model.tokenize(prompter.user(row.text)) for row in part]
            grammars = [call_grammar(row.text) for row in part] if grammar else None
            answers += model.answers(prompts, ANSWER_TOKENS, grammars)
            tick(len(part))
        refuses = model.metadata("causeway.refuse_token") is not None
    return summarise(path.parent.name, rows, answers, grammar=grammar, refuses=refuses)


def summarise(
    name: str, rows: Sequence[Row], answers: Sequence[Answer], *, grammar: bool, refuses: bool
) -> EvaluationReport:
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(group_of(row), []).append(index)
    results = tuple(_result(group, [rows[i] for i in at], [answers[i] for i in at]) for group, at in groups.items())
    auroc_value = None
    if refuses:
        marks = [(_outside(row), answer.refuse) for row, answer in zip(rows, answers, strict=True)]
        auroc_value = auroc([p for outside, p in marks if outside is False], [p for outside, p in marks if outside])
    return EvaluationReport(model=name, grammar=grammar, results=results, refusal_auroc=auroc_value)


def group_of(row: Row) -> str:
    """hwu64-device, hwu64-other, snips2017, clinc150, clinc150-oos, banking77, or the file's own name."""
    if row.source == "hwu64":
        return "hwu64-device" if is_device_row(row.source, row.intent) else "hwu64-other"
    if row.source == "clinc150" and row.intent == "oos":
        return "clinc150-oos"
    return row.source or "rows"


def auroc(inside: Sequence[float], outside: Sequence[float]) -> float | None:
    """Probability that a random outside score is above a random inside one, ties half; None when a side is empty."""
    if not inside or not outside:
        return None
    both: NDArray[np.float64] = np.asarray([*inside, *outside], dtype=np.float64)
    _, places, counts = np.unique(both, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks = (last - (counts - 1) / 2)[places]  # average rank, from 1
    above = ranks[len(inside) :].sum() - len(outside) * (len(outside) + 1) / 2
    return float(above / (len(inside) * len(outside)))


def _outside(row: Row) -> bool | None:
    """True outside the device's domain, False inside, None where the two overlap."""
    if is_device_row(row.source, row.intent):
        return False
    return True if is_refusable(row.source, row.intent) else None


def _result(group: str, rows: Sequence[Row], answers: Sequence[Answer]) -> GroupResult:
    scores = [score_answer(answer.text, row) for row, answer in zip(rows, answers, strict=True)]
    count = len(rows)
    return GroupResult(
        group=group,
        rows=count,
        intent=sum(one.intent for one in scores) / count,
        exact=sum(one.exact for one in scores) / count,
        valid=sum(one.valid for one in scores) / count,
        refused=sum(answer.refuse > REFUSED for answer in answers) / count,
    )
