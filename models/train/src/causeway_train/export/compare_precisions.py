"""The cost of quantisation: exact match and perplexity of one model at several precisions, on the same rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from ..data.prompt_renderer import PromptRenderer
from ..evaluate.greedy import GreedyModel
from ..function_calls.call import expected_call, score_answer
from ..function_calls.dataset import Row
from .quantize import quantize

KINDS = ("F32", "Q8_0", "Q4_0", "Q4_K_M")


class PrecisionResult(msgspec.Struct, frozen=True):
    """Results at one precision; shares are 0..1."""

    kind: str
    importance: bool  # whether it was quantised with the importance matrix
    size_bytes: int
    intent: float
    exact: float
    valid: float
    perplexity: float  # perplexity per token of the labelled answers


def compare(
    source: Path,
    rows: Sequence[Row],
    folder: Path,
    *,
    importance: Path | None = None,
    threads: int = 2,
    on_result: Callable[[PrecisionResult], None] = lambda one: None,
) -> list[PrecisionResult]:
    """Quantise the F32 GGUF `source` to each of KINDS in `folder`, 4-bit also with the importance matrix, and measure.

    Args:
        on_result: called with each result.
    """
    results = []
    for kind, use_importance in _variants(importance):
        path = source
        if kind != "F32":
            path = folder / f"{source.stem}.{kind}{'.imatrix' if use_importance else ''}.gguf"
            quantize(source, path, kind, importance=importance if use_importance else None, threads=threads)
        results.append(_measure(path, kind, use_importance, rows, threads))
        on_result(results[-1])
    return results


def _variants(importance: Path | None) -> Iterator[tuple[str, bool]]:
    for kind in KINDS:
        yield kind, False
        if importance and kind.startswith("Q4"):
            yield kind, True


def _measure(path: Path, kind: str, importance: bool, rows: Sequence[Row], threads: int) -> PrecisionResult:
    with GreedyModel(path, threads=threads) as model:
        prompter = PromptRenderer(model.chat_template)
        prompts = [model.tokenize(prompter.user(row.text)) for row in rows]
        scores = [score_answer(answer.text, row) for answer, row in zip(model.answers(prompts), rows, strict=True)]
        losses = [loss for row, prompt in zip(rows, prompts, strict=True) for loss in _losses(model, row, prompt)]
    return PrecisionResult(
        kind=kind,
        importance=importance,
        size_bytes=path.stat().st_size,
        intent=sum(one.intent for one in scores) / len(rows),
        exact=sum(one.exact for one in scores) / len(rows),
        valid=sum(one.valid for one in scores) / len(rows),
        perplexity=float(np.exp(np.mean(losses))),
    )


def _losses(model: GreedyModel, row: Row, prompt: Sequence[int]) -> list[float]:
    """Return minus the log probability of each token of the labelled answer."""
    target = model.tokenize(msgspec.json.encode(expected_call(row)).decode())
    logits = model.logits([*prompt, *target])[len(prompt) - 1 : -1].astype(np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return [-float(logprobs[position, token]) for position, token in enumerate(target)]
