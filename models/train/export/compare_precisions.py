"""What quantisation costs: exact match and perplexity of one model at several precisions, on the same rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from ...chat.template import PromptRenderer
from ...evaluate.greedy import GreedyModel
from ...function_calls.call import expected_call, score_answer
from ...function_calls.dataset import Row
from .quantize import quantize

KINDS = ("F32", "Q8_0", "Q4_0", "Q4_K_M")


class PrecisionResult(msgspec.Struct, frozen=True):
    """Figures of one precision; shares of 1."""

    kind: str
    importance: bool
    size_bytes: int
    intent: float
    exact: float
    valid: float
    perplexity: float  # of the labelled answers, per token


def compare(
    source: Path,
    rows: Sequence[Row],
    folder: Path,
    *,
    importance: Path | None = None,
    threads: int = 2,
    say: Callable[[PrecisionResult], None] = lambda one: None,
) -> list[PrecisionResult]:
    """Quantise the F32 GGUF `source` into `folder` to each kind, INT4 also with the importance matrix, and measure."""
    measured = []
    for kind, weighed in _variants(importance):
        path = source
        if kind != "F32":
            path = folder / f"{source.stem}.{kind}{'.weighed' if weighed else ''}.gguf"
            quantize(source, path, kind, importance=importance if weighed else None, threads=threads)
        measured.append(_measure(path, kind, weighed, rows, threads))
        say(measured[-1])
    return measured


def _variants(importance: Path | None) -> Iterator[tuple[str, bool]]:
    for kind in KINDS:
        yield kind, False
        if importance and kind.startswith("Q4"):
            yield kind, True


def _measure(path: Path, kind: str, weighed: bool, rows: Sequence[Row], threads: int) -> PrecisionResult:
    with GreedyModel(path, threads=threads) as model:
        prompter = PromptRenderer(model.chat_template)
        prompts = [model.tokenize(prompter.user(row.text)) for row in rows]
        scores = [score_answer(one.text, row) for one, row in zip(model.answers(prompts), rows, strict=True)]
        losses = [loss for row, prompt in zip(rows, prompts, strict=True) for loss in _losses(model, row, prompt)]
    return PrecisionResult(
        kind=kind,
        importance=weighed,
        size_bytes=path.stat().st_size,
        intent=sum(one.intent for one in scores) / len(rows),
        exact=sum(one.exact for one in scores) / len(rows),
        valid=sum(one.valid for one in scores) / len(rows),
        perplexity=float(np.exp(np.mean(losses))),
    )


def _losses(model: GreedyModel, row: Row, prompt: Sequence[int]) -> list[float]:
    """Minus the log probability of each token of the labelled answer."""
    wanted = model.tokenize(msgspec.json.encode(expected_call(row)).decode())
    logits = model.logits([*prompt, *wanted])[len(prompt) - 1 : -1].astype(np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return [-float(logprobs[at, token]) for at, token in enumerate(wanted)]
