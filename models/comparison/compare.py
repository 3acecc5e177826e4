"""The figures of a comparison of two models, and an owner's limits for them.

Figures per token need the same vocabulary. They are of each prompt and its reference answer, or else the first model's
answer; tokens that all prompts begin with, such as a template's system message, are not counted.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from causeway_server.router.errors import EngineUnavailable

from ..catalog.artifact import ArtifactError
from ..llama_cpp.protocol import KVType
from .model import ComparedModel, GreedyAnswer
from .prompts import EvaluationPrompt, is_right

_Z = 1.96  # of 95 %
_WORD = re.compile(r"\w+")
# The figures that may have a limit: whether the limit is the largest allowed value.
LIMITS: Mapping[str, bool] = {
    "kl_mean": True,
    "kl_p99": True,
    "perplexity_ratio": True,
    "top1": False,
    "exact_match": False,
    "rouge_l": False,
    "accuracy_change": False,
}


class Share(msgspec.Struct, frozen=True):
    """A share, or a difference of shares, with its 95 % interval."""

    value: float
    low: float
    high: float


class ModelFigures(msgspec.Struct, frozen=True):
    """The figures of one model. `accuracy`: by task, and of all prompts that have a reference as `all`."""

    file: str
    size_bytes: int
    memory_bytes: int
    prompt_tokens_per_s: float | None
    tokens_per_s: float | None
    perplexity: float | None
    accuracy: dict[str, Share]


class Comparison(msgspec.Struct, frozen=True):
    """The figures of two models, and of what the second one changes; None where they cannot be measured (vocabularies
    differ, no answers, no references).
    """

    first: ModelFigures
    second: ModelFigures
    prompts: int
    answered: int  # the number of prompts that both models answered, drawn evenly over the file
    tokens: int  # the number of tokens that are counted
    kl_mean: float | None  # KL divergence of the second model's distribution from the first one's, nats a token: mean
    kl_p99: float | None  # its 99th percentile
    top1: float | None  # share of the tokens for which both find the same one the likeliest
    perplexity_ratio: float | None
    exact_match: float | None  # share of equal answers
    rouge_l: float | None  # mean ROUGE-L (Lin 2004, F1 of words)
    accuracy_change: Share | None  # the second model's accuracy less the first one's, of the same prompts

    def figure(self, name: str) -> float | None:
        """Return a figure of `LIMITS`."""
        found: float | Share | None = getattr(self, name)
        return found.value if isinstance(found, Share) else found


class Run(msgspec.Struct, frozen=True):
    """The settings of a comparison. `answers`: largest number of answered prompts; `kv_types`: of both models."""

    context: int = 2048
    answers: int = 200
    threads: int = 2
    kv_types: tuple[KVType, KVType] = ("f16", "f16")


class Gate(msgspec.Struct, frozen=True):
    """A model to compare with before another one is published, and the limits that the other one must keep."""

    against: Path
    prompts: tuple[EvaluationPrompt, ...]
    limits: dict[str, float]
    run: Run = Run()

    def check(self, file: Path) -> dict[str, float]:
        """Compare `file`, and return the figures for its manifest. Raises ArtifactError if a limit is not kept."""
        found = compare(self.against, file, self.prompts, self.run)
        if broken := broken_limits(found, self.limits):
            counts = f"{found.answered} of {found.prompts} prompts were answered"
            raise ArtifactError(
                f"{file}: refused in the comparison with {self.against}: {'; '.join(broken)} ({counts})"
            )
        figures = {name: found.figure(name) for name in LIMITS} | {"prompts": found.prompts, "answered": found.answered}
        return {f"compared/{name}": round(value, 5) for name, value in figures.items() if value is not None}


def parse_limits(texts: Sequence[str]) -> dict[str, float]:
    """Read limits such as `kl_mean=0.05`. Raises ArtifactError."""
    limits = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            limits[name] = float(value)
        except ValueError:
            name = ""
        if name not in LIMITS:
            raise ArtifactError(f"--limit {text}: write FIGURE=NUMBER; the figures are {', '.join(LIMITS)}")
    return limits


def broken_limits(found: Comparison, limits: Mapping[str, float]) -> list[str]:
    """Return a sentence for each limit that is not kept. A figure that was not measured, or is NaN, keeps none."""
    broken = []
    for name, limit in limits.items():
        value = found.figure(name)
        if value is None:
            broken.append(f"{name} could not be measured with these prompts and models")
        elif not (value <= limit if LIMITS[name] else value >= limit):
            broken.append(f"{name} is {value:.4g}, the limit is {limit:.4g}")
    return broken


def compare(
    first: Path,
    second: Path,
    prompts: Sequence[EvaluationPrompt],
    run: Run,
    progress: Callable[[], object] = lambda: None,
) -> Comparison:
    """Compare two GGUF files, calling `progress` after each prompt. Raises ArtifactError."""
    models: list[ComparedModel] = []
    try:
        for path, kv_type in zip((first, second), run.kv_types, strict=True):
            models.append(ComparedModel(path, context=run.context, threads=run.threads, kv_type=kv_type))
        same = models[0].vocabulary.pieces == models[1].vocabulary.pieces
        encoded = [[model.encode(prompt) for model in models] for prompt in prompts]
        known = _common_prefix([tokens.tolist() for tokens, _ in encoded])
        chosen = _evenly(len(prompts), run.answers)
        answers: list[tuple[GreedyAnswer, ...]] = []
        rows: list[NDArray[np.float64]] = []
        for index, (prompt, both) in enumerate(zip(prompts, encoded, strict=True)):
            if index in chosen:
                limit = prompt.answer_tokens
                answers.append(tuple(one.answer(own, limit) for one, own in zip(models, both, strict=True)))
            if same:
                answered = answers[-1][0].tokens if index in chosen else ()
                if prompt.answer is not None:
                    answered = tuple(models[0].vocabulary.encode(prompt.answer, special=False, add_bos=False))
                rows.append(_of_tokens(models, np.array([*both[0], *answered], np.int32)[: run.context], known))
            progress()
        return _figures((first, second), models, [prompts[index] for index in chosen], answers, rows, len(prompts))
    except EngineUnavailable as error:
        raise ArtifactError(error.message) from error
    finally:
        for model in models:
            model.close()


def rouge_l(text: str, reference: str) -> float:
    """Return the F1 of the longest common subsequence of words (Lin 2004, "ROUGE")."""
    one, other = (_WORD.findall(each.lower()) for each in (text, reference))
    lengths = [0] * (len(other) + 1)
    for word in one:
        before = lengths[:]
        for index, wanted in enumerate(other, start=1):
            lengths[index] = before[index - 1] + 1 if word == wanted else max(before[index], lengths[index - 1])
    return 2 * lengths[-1] / (len(one) + len(other)) if one or other else 1.0


def wilson(right: int, count: int) -> Share:
    """Return a share with its interval (Wilson 1927)."""
    share, spread = right / count, _Z * _Z / count
    middle = (share + spread / 2) / (1 + spread)
    half = _Z * math.sqrt(share * (1 - share) / count + spread / count / 4) / (1 + spread)
    return Share(share, max(0.0, middle - half), min(1.0, middle + half))


def _evenly(prompts: int, most: int) -> list[int]:
    """Return the indices of at most so many prompts, ascending: one drawn of each part, the same in every run."""
    rng, count = random.Random(0), min(prompts, most)
    return [rng.randrange(part * prompts // count, (part + 1) * prompts // count) for part in range(count)]


def _common_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """Return how many first tokens all prompts share; 0 for one prompt."""
    columns = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=False))
    return sum(1 for _ in columns) if len(prompts) > 1 else 0


def _of_tokens(models: Sequence[ComparedModel], tokens: NDArray[np.int32], known: int) -> NDArray[np.float64]:
    """Return the divergence, whether the likeliest tokens are equal, and both losses: float64 [4, counted tokens]."""
    parts, start = [], 0
    for chunks in zip(*(model.logits(tokens) for model in models), strict=True):
        wanted = tokens[start + 1 : start + len(chunks[0]) + 1]
        skipped = min(max(0, known - 1 - start), len(wanted))
        start += len(chunks[0])
        one, other = (_log_softmax(chunk[skipped : len(wanted)]) for chunk in chunks)
        place = np.arange(len(one)), wanted[skipped:]
        divergence = (np.exp(one) * (one - other)).sum(-1, dtype=np.float64)
        parts.append(np.stack([divergence, one.argmax(-1) == other.argmax(-1), -one[place], -other[place]]))
    return np.concatenate(parts, axis=1)


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    shifted = logits - logits.max(-1, keepdims=True)
    result: NDArray[np.float32] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def _figures(
    files: Sequence[Path],
    models: Sequence[ComparedModel],
    answered: Sequence[EvaluationPrompt],
    answers: Sequence[tuple[GreedyAnswer, ...]],
    rows: Sequence[NDArray[np.float64]],
    prompts: int,
) -> Comparison:
    right = [
        (prompt.task, [is_right(prompt, one.text, one.alternatives) for one in pair])
        for prompt, pair in zip(answered, answers, strict=True)
        if prompt.answer is not None
    ]
    table = np.concatenate(rows, axis=1) if rows else np.zeros((4, 0))
    losses = [float(loss) for loss in table[2:].mean(-1)] if table.size else []
    one, other = (
        ModelFigures(
            file=str(file),
            size_bytes=file.stat().st_size,
            memory_bytes=model.memory_bytes,
            prompt_tokens_per_s=model.read[0] / model.read[1] if model.read[1] else None,
            tokens_per_s=model.written[0] / model.written[1] if model.written[1] else None,
            perplexity=math.exp(min(losses[index], 700.0)) if losses else None,
            accuracy=_accuracy([(task, both[index]) for task, both in right]),
        )
        for index, (file, model) in enumerate(zip(files, models, strict=True))
    )
    texts = [(first.text, second.text) for first, second in answers]
    return Comparison(
        one,
        other,
        prompts=prompts,
        answered=len(answers),
        tokens=table.shape[1],
        kl_mean=float(table[0].mean()) if losses else None,
        kl_p99=float(np.percentile(table[0], 99)) if losses else None,
        top1=float(table[1].mean()) if losses else None,
        perplexity_ratio=math.exp(min(losses[1] - losses[0], 700.0)) if losses else None,
        exact_match=sum(first == second for first, second in texts) / len(texts) if texts else None,
        rouge_l=sum(rouge_l(second, first) for first, second in texts) / len(texts) if texts else None,
        accuracy_change=_change([both for _, both in right]) if right else None,
    )


def _accuracy(right: Sequence[tuple[str, bool]]) -> dict[str, Share]:
    groups = {"all": [one for _, one in right]} if right else {}
    for task, one in right:
        groups.setdefault(task, []).append(one)
    return {name: wilson(sum(group), len(group)) for name, group in groups.items()}


def _change(right: Sequence[Sequence[bool]]) -> Share:
    """Return the difference of two shares of the same prompts, with the interval of paired differences."""
    differences = np.array([float(second) - float(first) for first, second in right])
    mean, half = float(differences.mean()), float(_Z * differences.std() / math.sqrt(len(differences)))
    return Share(mean, mean - half, mean + half)
