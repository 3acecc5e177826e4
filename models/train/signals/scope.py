"""Teach what is out of scope: three linear heads over the intents, the nearest taught texts, and a line over all.

The line has to see how the heads fare on texts that they were not taught. So a part of the rows is kept from a first
pair of heads, the line is fitted on these rows and on the texts that are known to be out of scope, and then the heads
are taught again on everything. A model's confidence is another matter: it has seen all of these rows. So the line that
joins it in is fitted on half of the held-back rows, and measured on the other half. Nothing here needs torch.
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
from .logistic import fit_line
from .quality import HALVES
from .scope_graph import write_scope
from .scope_heads import IntentExamples, IntentHeads, TextFeatures

EPOCHS = 15
KEPT = 0.2  # of the rows, for the line
_LINE = "line"
FOLDS = 5
_TRUST = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)  # ridges: the larger, the less a confidence counts

Ask = Callable[[Sequence[str]], Sequence[Confidence]]  # texts → how sure a model was of its answers


class ScopeMetrics(msgspec.Struct, frozen=True):
    """On held-back rows: area under the ROC curve, out of scope against in scope; share of right intents in scope."""

    auroc: float
    half_auroc: float  # the same on the half that the next one is measured on
    joined_auroc: float  # with a model's confidence
    intent: float
    rows: int
    outside: int  # of the rows

    def metrics(self) -> dict[str, float]:
        figures: dict[str, float] = msgspec.structs.asdict(self)
        return figures


def train_scope(
    rows: Sequence[Row],
    held: Sequence[Row],
    encoder: SentenceEncoder,
    ask: Ask,
    target: Path,
    *,
    seed: int = 1,
    epochs: int = EPOCHS,
    say: Callable[[str], None] = lambda _: None,
) -> ScopeMetrics:
    """Teach on `rows` (intent `oos`: out of scope), measure on `held`, write the graph to `target`."""
    taught = [row for row in rows if row.intent != "oos"]
    names = {name: number for number, name in enumerate(sorted({row.intent for row in taught}))}
    intents = np.array([names[row.intent] for row in taught])
    views = TextFeatures.of(encoder, [row.text for row in taught])
    kept = np.array([is_held_out(row.text, _LINE, KEPT) for row in taught])
    first, known = (
        IntentHeads(views.part(~kept), intents[~kept], seed, epochs),
        IntentExamples.of(views.part(~kept), intents[~kept]),
    )
    say("scope: the heads that the line is fitted on are taught")
    outside = [row.text for row in rows if row.intent == "oos"]
    truth = np.array([False] * int(kept.sum()) + [True] * len(outside))
    seen = np.concatenate([told(first, known, part) for part in (views.part(kept), TextFeatures.of(encoder, outside))])
    weights = np.where(truth, 0.5 / truth.mean(), 0.5 / (1 - truth.mean()))
    lines = {ALONE_KEY: fit_line(seen, truth, weights)}
    heads = IntentHeads(views, intents, seed, epochs)
    say("scope: the heads are taught again, on everything")
    everything = IntentExamples.of(views, intents)
    write_scope(heads, everything, {**lines, JOINED_KEY: lines[ALONE_KEY]}, target)
    lines[JOINED_KEY] = _joined(ScopeEstimator(target, encoder), held, ask)
    write_scope(heads, everything, lines, target)
    scope = ScopeEstimator(target, encoder)
    right = [scope.intent(row.text) == names.get(row.intent) for row in held if row.intent != "oos"]
    fit = measure(scope, held, ask)
    return msgspec.structs.replace(fit, intent=float(np.mean(right)) if right else 0.0)


def measure(scope: ScopeEstimator, rows: Sequence[Row], ask: Ask) -> ScopeMetrics:
    """`intent` is left at 0: a file does not say in which order the heads know the intents."""
    half = [row for row in rows if not is_held_out(row.text, HALVES, 0.5)]
    return ScopeMetrics(
        auroc=_area([scope(row.text) for row in rows], rows),
        half_auroc=_area([scope(row.text) for row in half], half),
        joined_auroc=_area(
            [scope(row.text, one) for row, one in zip(half, ask([row.text for row in half]), strict=True)], half
        ),
        intent=0.0,
        rows=len(rows),
        outside=sum(row.intent == "oos" for row in rows),
    )


def _area(told: Sequence[float], rows: Sequence[Row]) -> float:
    """0 where one side is empty."""
    outside = np.array([row.intent == "oos" for row in rows], bool)
    values = np.array(told)
    return auroc(values[~outside].tolist(), values[outside].tolist()) or 0.0


def _joined(scope: ScopeEstimator, held: Sequence[Row], ask: Ask) -> LinearLogit:
    """A line over what is known from the prompt and what a model's first tokens say. How far the tokens are trusted is
    the ridge that does best on rows that a line has not seen: few rows are out of scope, and a model that turns away
    much that is in scope may add nothing.
    """
    half = [row for row in held if is_held_out(row.text, HALVES, 0.5)]
    sure = ask([row.text for row in half])
    seen = np.array([(log_odds(scope(row.text)), *joined_inputs(one)) for row, one in zip(half, sure, strict=True)])
    truth = np.array([row.intent == "oos" for row in half])
    weights = np.where(truth, 0.5 / max(truth.mean(), 1e-9), 0.5 / max(1 - truth.mean(), 1e-9))
    folds = np.array([zlib.crc32(row.text.encode()) % FOLDS for row in half])
    best = min(_TRUST, key=lambda ridge: _unseen_loss(seen, truth, weights, folds, ridge))
    return fit_line(seen, truth, weights, ridges=_ridges(seen, best))


def _ridges(seen: NDArray[np.float64], ridge: float) -> list[float]:
    """Little for the prompt's score, `ridge` for the rest."""
    return [_TRUST[0], *[ridge] * (seen.shape[1] - 1)]


def _unseen_loss(
    seen: NDArray[np.float64],
    truth: NDArray[np.bool_],
    weights: NDArray[np.float64],
    folds: NDArray[np.int64],
    ridge: float,
) -> float:
    """Weighted log loss of lines on the fold that each was not fitted on."""
    loss = 0.0
    for fold in range(FOLDS):
        out = folds == fold
        if not out.any() or out.all():
            continue
        line = fit_line(seen[~out], truth[~out], weights[~out], ridges=_ridges(seen, ridge))
        odds = seen[out] @ np.array(line.weights) + line.bias
        loss += float((weights[out] * np.logaddexp(0.0, np.where(truth[out], -odds, odds))).sum())
    return loss


def told(heads: IntentHeads, taught: IntentExamples, views: TextFeatures) -> NDArray[np.float64]:
    """float64 [texts, 3]: how undecided the heads are, how far the nearest taught text is, and how far the nearest one
    of the likeliest intent is.
    """
    odds = heads.odds(views)
    undecided = -(odds * np.log(odds + 1e-9)).sum(axis=1)
    likeliest = odds.argmax(axis=1)
    near, own = [], []
    for at in np.array_split(np.arange(len(views)), -(-len(views) // 512)):
        nearness = views.vectors[at] @ taught.vectors.T
        near.append(nearness.max(axis=1))
        own.append(np.where(likeliest[at, None] == taught.intents, nearness, -1).max(axis=1))
    return np.stack([undecided, 1 - np.concatenate(near), 1 - np.concatenate(own)], axis=1).astype(np.float64)
