"""Train out-of-scope detection: three linear heads over the intents, nearest training texts, a logistic regression.

The regression must see the heads on texts that they were not trained on:

1. First heads are trained without a held-out part of the rows.
2. The regression is fitted on the held-out rows and on texts that are known to be out of scope.
3. The heads are trained again on all rows.
4. The regression that joins in a model's confidence is fitted on half of the held-back rows, because the model was
   trained on all others; it is measured on the other half.

Nothing here needs torch.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from router.types import Confidence

from ...evaluate.assistant import auroc
from ...function_calls.dataset import Row, is_held_out
from ...signals.calibration import LinearLogit, log_odds
from ...signals.encoder import SentenceEncoder
from ...signals.scope import ALONE_KEY, JOINED_KEY, ScopeEstimator, joined_inputs
from .optimizers import Array64, Indices, fit_logistic
from .quality import HALVES
from .scope_graph import write_scope
from .scope_heads import IntentExamples, IntentHeads, TextFeatures

EPOCHS = 15
HELD_OUT_SHARE, _HELD_OUT_SEED = 0.2, "line"  # share of the rows that the first heads are not trained on
FOLDS = 5
_RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)  # L2 penalties: the larger, the less weight a confidence has

ConfidenceSource = Callable[[Sequence[str]], Sequence[Confidence]]  # texts → a model's confidence in its answers


class ScopeMetrics(msgspec.Struct, frozen=True):
    """Metrics on held-back rows. The field names are keys in the manifest of the shipped signal."""

    auroc: float  # out of scope against in scope, from the prompt alone
    half_auroc: float  # the same on the half that `joined_auroc` is measured on
    joined_auroc: float  # joined with a model's confidence
    intent: float  # share of correct intents in scope
    rows: int
    outside: int  # rows that are out of scope

    def metrics(self) -> dict[str, float]:
        """Return all figures as one mapping, for a manifest."""
        figures: dict[str, float] = msgspec.structs.asdict(self)
        return figures


def train_scope(
    rows: Sequence[Row],
    held: Sequence[Row],
    encoder: SentenceEncoder,
    confidences: ConfidenceSource,
    target: Path,
    *,
    seed: int = 1,
    epochs: int = EPOCHS,
    progress: Callable[[str], None] = lambda _: None,
) -> ScopeMetrics:
    """Train on `rows` (intent `oos`: out of scope), write the graph to `target`, and measure on `held`."""
    in_scope = [row for row in rows if row.intent != "oos"]
    names = {name: number for number, name in enumerate(sorted({row.intent for row in in_scope}))}
    intents = np.array([names[row.intent] for row in in_scope])
    features = TextFeatures.of(encoder, [row.text for row in in_scope])
    held_out = np.array([is_held_out(row.text, _HELD_OUT_SEED, HELD_OUT_SHARE) for row in in_scope])
    lines = {ALONE_KEY: _fit_alone(features, intents, held_out, rows, encoder, seed, epochs)}  # (1), (2)
    progress("scope: first heads and regression are trained")
    heads = IntentHeads(features, intents, seed, epochs)  # (3)
    progress("scope: final heads are trained")
    examples = IntentExamples.of(features, intents)
    write_scope(heads, examples, {**lines, JOINED_KEY: lines[ALONE_KEY]}, target)
    lines[JOINED_KEY] = _fit_joined(ScopeEstimator(target, encoder), held, confidences)  # (4)
    write_scope(heads, examples, lines, target)
    scope = ScopeEstimator(target, encoder)
    correct = [scope.intent(row.text) == names.get(row.intent) for row in held if row.intent != "oos"]
    metrics = measure(scope, held, confidences)
    return msgspec.structs.replace(metrics, intent=float(np.mean(correct)) if correct else 0.0)


def measure(scope: ScopeEstimator, rows: Sequence[Row], confidences: ConfidenceSource) -> ScopeMetrics:
    """Measure an estimator on `rows`. `intent` is 0: a published file does not hold the intents' names."""
    half = [row for row in rows if not is_held_out(row.text, HALVES, 0.5)]
    known = confidences([row.text for row in half])
    return ScopeMetrics(
        auroc=_auroc([scope(row.text) for row in rows], rows),
        half_auroc=_auroc([scope(row.text) for row in half], half),
        joined_auroc=_auroc([scope(row.text, one) for row, one in zip(half, known, strict=True)], half),
        intent=0.0,
        rows=len(rows),
        outside=sum(row.intent == "oos" for row in rows),
    )


def _auroc(probabilities: Sequence[float], rows: Sequence[Row]) -> float:
    """Return the AUROC, 0 if one side is empty."""
    outside = np.array([row.intent == "oos" for row in rows], bool)
    values = np.array(probabilities)
    return auroc(values[~outside].tolist(), values[outside].tolist()) or 0.0


def _fit_alone(
    features: TextFeatures,
    intents: Indices,
    held_out: NDArray[np.bool_],
    rows: Sequence[Row],
    encoder: SentenceEncoder,
    seed: int,
    epochs: int,
) -> LinearLogit:
    training = features.select(~held_out)
    heads = IntentHeads(training, intents[~held_out], seed, epochs)
    examples = IntentExamples.of(training, intents[~held_out])
    outside = TextFeatures.of(encoder, [row.text for row in rows if row.intent == "oos"])
    truth = np.array([False] * int(held_out.sum()) + [True] * len(outside))
    inputs = [scope_inputs(heads, examples, part) for part in (features.select(held_out), outside)]
    weights = np.where(truth, 0.5 / truth.mean(), 0.5 / (1 - truth.mean()))
    return fit_logistic(np.concatenate(inputs), truth, weights)


def _fit_joined(scope: ScopeEstimator, held: Sequence[Row], confidences: ConfidenceSource) -> LinearLogit:
    """Fit a regression over the prompt's score and a model's confidence.

    The confidence's L2 penalty is the one with the least cross-validated loss: few rows are out of scope, and a model
    that refuses much that is in scope may add nothing.
    """
    half = [row for row in held if is_held_out(row.text, HALVES, 0.5)]
    known = confidences([row.text for row in half])
    inputs = np.array([(log_odds(scope(row.text)), *joined_inputs(one)) for row, one in zip(half, known, strict=True)])
    truth = np.array([row.intent == "oos" for row in half])
    weights = np.where(truth, 0.5 / max(truth.mean(), 1e-9), 0.5 / max(1 - truth.mean(), 1e-9))
    folds = np.array([zlib.crc32(row.text.encode()) % FOLDS for row in half])
    best = min(_RIDGES, key=lambda ridge: _cross_validated_loss(inputs, truth, weights, folds, ridge))
    return fit_logistic(inputs, truth, weights, ridges=_penalties(inputs, best))


def _penalties(inputs: Array64, ridge: float) -> list[float]:
    """Return a small penalty for the prompt's score and `ridge` for all other inputs."""
    return [_RIDGES[0], *[ridge] * (inputs.shape[1] - 1)]


def _cross_validated_loss(
    inputs: Array64, truth: NDArray[np.bool_], weights: Array64, folds: Indices, ridge: float
) -> float:
    """Return the weighted log loss on held-out folds."""
    loss = 0.0
    for fold in range(FOLDS):
        out = folds == fold
        if not out.any() or out.all():
            continue
        line = fit_logistic(inputs[~out], truth[~out], weights[~out], ridges=_penalties(inputs, ridge))
        odds = inputs[out] @ np.array(line.weights) + line.bias
        loss += float((weights[out] * np.logaddexp(0.0, np.where(truth[out], -odds, odds))).sum())
    return loss


def scope_inputs(heads: IntentHeads, examples: IntentExamples, features: TextFeatures) -> Array64:
    """Return the regression's inputs, float64 [texts, 3].

    The entropy of the heads, the distance to the nearest training text, and to the nearest one of the likeliest intent.
    """
    probabilities = heads.probabilities(features)
    entropy = -(probabilities * np.log(probabilities + 1e-9)).sum(axis=1)
    likeliest = probabilities.argmax(axis=1)
    nearest, nearest_of_intent = [], []
    for chunk in np.array_split(np.arange(len(features)), -(-len(features) // 512)):
        cosines = features.vectors[chunk] @ examples.vectors.T
        nearest.append(cosines.max(axis=1))
        nearest_of_intent.append(np.where(likeliest[chunk, None] == examples.intents, cosines, -1).max(axis=1))
    distances = [1 - np.concatenate(nearest), 1 - np.concatenate(nearest_of_intent)]
    return np.stack([entropy, *distances], axis=1).astype(np.float64)
