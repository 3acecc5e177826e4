"""Measurement of an assistant on labelled rows: correct function, exact call, valid JSON, and refusals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from causeway_server.models.constraints.grammars import ANSWER_TOKENS, call_grammar
from causeway_server.models.llama_cpp.protocol import AdapterFile

from ..data.prompt_renderer import PromptRenderer
from ..function_calls.call import score_answer
from ..function_calls.dataset import Row
from ..function_calls.intents import is_device_row, is_refusable
from .greedy import Answer, GreedyModel
from .report import EvaluationReport, GroupResult

REFUSED = 0.5  # probability of the refusal token above which an answer counts as a refusal


def evaluate(
    path: Path,
    rows: Sequence[Row],
    *,
    grammar: bool = False,
    threads: int = 2,
    adapter: AdapterFile | None = None,
    tick: Callable[[int], None] = lambda count: None,
) -> EvaluationReport:
    """Answer every row greedily with the GGUF at `path` and score the answers.

    Args:
        grammar: constrain each answer to the call grammar of its message, as the engine does.
        adapter: LoRA adapter to answer with.
        tick: called with the number of rows done since the last call.
    """
    answers: list[Answer] = []
    with GreedyModel(path, threads=threads, adapter=adapter) as model:
        prompter = PromptRenderer(model.chat_template)
        for start in range(0, len(rows), 64):
            chunk = rows[start : start + 64]
            prompts = [model.tokenize(prompter.user(row.text)) for row in chunk]
            grammars = [call_grammar(row.text) for row in chunk] if grammar else None
            answers += model.answers(prompts, ANSWER_TOKENS, grammars)
            tick(len(chunk))
        refuses = model.metadata("causeway.refuse_token") is not None
    name = path.parent.name if adapter is None else f"{path.parent.name}+{adapter.name}"
    return summarise(name, rows, answers, grammar=grammar, refuses=refuses)


def summarise(
    name: str, rows: Sequence[Row], answers: Sequence[Answer], *, grammar: bool, refuses: bool
) -> EvaluationReport:
    """Score `answers` to `rows` by group. `refuses`: the model has a refusal token."""
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(group_of(row), []).append(index)
    results = tuple(
        _result(group, [rows[i] for i in members], [answers[i] for i in members]) for group, members in groups.items()
    )
    auroc_value = None
    if refuses:
        pairs = [(_outside(row), answer.refuse) for row, answer in zip(rows, answers, strict=True)]
        auroc_value = auroc([p for outside, p in pairs if outside is False], [p for outside, p in pairs if outside])
    return EvaluationReport(model=name, grammar=grammar, results=results, refusal_auroc=auroc_value)


def group_of(row: Row) -> str:
    """Return hwu64-device, hwu64-other, snips2017, clinc150, clinc150-oos, banking77, or the row's source."""
    if row.source == "hwu64":
        return "hwu64-device" if is_device_row(row.source, row.intent) else "hwu64-other"
    if row.source == "clinc150" and row.intent == "oos":
        return "clinc150-oos"
    return row.source or "rows"


def auroc(inside: Sequence[float], outside: Sequence[float]) -> float | None:
    """Return the probability that a random `outside` score exceeds a random `inside` one, ties counting half.

    None when a side is empty.
    """
    if not inside or not outside:
        return None
    both: NDArray[np.float64] = np.asarray([*inside, *outside], dtype=np.float64)
    _, positions, counts = np.unique(both, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks = (last - (counts - 1) / 2)[positions]  # average rank, from 1
    above = ranks[len(inside) :].sum() - len(outside) * (len(outside) + 1) / 2
    return float(above / (len(inside) * len(outside)))


def _outside(row: Row) -> bool | None:
    """Return True outside the device's domain, False inside, and None if the row is close to both."""
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
