"""Train `edge.quality` on what the device's model gets right and wrong, and write it as one ONNX graph.

Hashed words → mean of their rows → two layers → log odds, then a slope and an offset for honest probabilities. It
learns from the answers to training rows. Those the model has seen, and it is better at them than at others: so the
calibration is made on rows that were held back from the model, and measured on others of these. It needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...evaluate.assistant import auroc
from ...function_calls.dataset import is_held_out
from ...signals.quality import BUCKETS, QualityEstimator, features
from .adam import Adam, Reals
from .graded_answers import GradedAnswer
from .logistic import fit_line, mix_weights
from .onnx_writer import FLOAT, INT64, Node, Port, write_onnx

WIDTH, HIDDEN, EPOCHS, BATCH = 32, 16, 4, 256
RATE, DECAY, DROPOUT = 3e-3, 1e-2, 0.1
BINS = 10
HALVES = "calibrate"


class QualityMetrics(msgspec.Struct, frozen=True):
    """Figures on held-back prompts that neither training nor calibration saw."""

    auroc: float
    ece: float  # expected calibration error, ten equal bins, over the mix of traffic that it was calibrated for
    own_auroc: float  # the same on the device's own domain alone
    own_ece: float
    right: float  # share of prompts answered rightly
    rows: int

    def metrics(self) -> dict[str, float]:
        figures: dict[str, float] = msgspec.structs.asdict(self)
        return figures


def halves(held: Sequence[GradedAnswer]) -> tuple[list[GradedAnswer], list[GradedAnswer]]:
    """Held-back prompts to calibrate on, and to measure on. A hash of the text decides: doubles stay together."""
    first = [one for one in held if is_held_out(one.text, HALVES, 0.5)]
    return first, [one for one in held if not is_held_out(one.text, HALVES, 0.5)]


def train_quality(
    learnt: Sequence[GradedAnswer],
    held: Sequence[GradedAnswer],
    target: Path,
    *,
    seed: int,
    epochs: int = EPOCHS,
    say: Callable[[str], None] = lambda _: None,
) -> QualityMetrics:
    """Learn from `learnt`, calibrate on one half of `held`, measure on the other; write the graph to `target`."""
    estimator = QualityNetwork(np.random.default_rng(seed))
    estimator.learn(learnt, epochs, say)
    first, second = halves(held)
    # A slope and an offset on the log odds (Platt 1999).
    odds = estimator.odds([one.text for one in first])
    line = fit_line(odds[:, None], truths(first), mix_weights(first))
    estimator.rescale(line.weights[0], line.bias)
    estimator.write(target)
    quality = QualityEstimator(target)
    return measure(np.array([quality(one.text) for one in second]), second)


def measure(told: NDArray[np.float64], judged: Sequence[GradedAnswer]) -> QualityMetrics:
    """How good the probabilities `told` [judged] are."""
    truth, own = truths(judged), np.array([one.own for one in judged], bool)
    return QualityMetrics(
        auroc=_area(told, truth),
        ece=calibration_error(told, truth, mix_weights(judged)),
        own_auroc=_area(told[own], truth[own]),
        own_ece=calibration_error(told[own], truth[own]),
        right=float(truth.mean()),
        rows=len(truth),
    )


def truths(judged: Sequence[GradedAnswer]) -> NDArray[np.bool_]:
    return np.array([one.right for one in judged], bool)


def calibration_error(
    told: NDArray[np.float64], truth: NDArray[np.bool_], weights: NDArray[np.float64] | None = None, bins: int = BINS
) -> float:
    """Mean distance between what was promised and what held, over equal bins, weighted by what falls into them."""
    shares = np.ones(len(told)) if weights is None else weights
    places = np.minimum((told * bins).astype(int), bins - 1)
    sums = [np.bincount(places, weights=shares * values, minlength=bins) for values in (told, truth)]
    return float(np.abs(sums[0] - sums[1]).sum() / shares.sum()) if len(told) else 0.0


class QualityNetwork:
    """The network, with its gradients written out."""

    def __init__(self, draw: np.random.Generator) -> None:
        self._draw = draw
        self._table = Adam(_normal(draw, (BUCKETS, WIDTH), 0.1), decay=DECAY)
        self._w1, self._b1 = (
            Adam(_normal(draw, (WIDTH, HIDDEN), WIDTH**-0.5), decay=DECAY),
            Adam(np.zeros(HIDDEN, np.float32)),
        )
        self._w2, self._b2 = Adam(_normal(draw, (HIDDEN, 1), HIDDEN**-0.5), decay=DECAY), Adam(np.zeros(1, np.float32))

    def odds(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """Log odds [texts] of a right answer."""
        means = np.stack([self._table.value[features(text)].mean(axis=0) for text in texts])
        hidden = np.maximum(means @ self._w1.value + self._b1.value, 0)
        odds: NDArray[np.float64] = (hidden @ self._w2.value + self._b2.value)[:, 0].astype(np.float64)
        return odds

    def learn(self, judged: Sequence[GradedAnswer], epochs: int, say: Callable[[str], None]) -> None:
        bags = [features(one.text) for one in judged]
        truth = truths(judged).astype(np.float32)
        for epoch in range(epochs):
            order = self._draw.permutation(len(bags))
            rate = RATE * (1 - epoch / epochs)
            parts = np.array_split(order, -(-len(order) // BATCH))
            losses = [self._step([bags[i] for i in at], truth[at], rate) for at in parts]
            say(f"edge.quality: epoch {epoch + 1} of {epochs}, loss {np.mean(losses):.3f}")

    def rescale(self, slope: float, offset: float) -> None:
        """Fold a calibration into the last layer."""
        self._w2.value *= np.float32(slope)
        self._b2.value[:] = self._b2.value * np.float32(slope) + np.float32(offset)

    def write(self, path: Path) -> None:
        """features int64 [n] → probability float32 [1]; the table in int8 with one scale."""
        table = self._table.value
        scale = np.float32(np.abs(table).max() / 127)
        write_onnx(
            path,
            "edge_quality",
            [
                Node("Gather", ["table", "features"], ["rows"]),
                Node("Cast", ["rows"], ["reals"], {"to": FLOAT}),
                Node("ReduceMean", ["reals", "axis"], ["steps"], {"keepdims": 0}),
                Node("Mul", ["steps", "scale"], ["mean"]),
                Node("MatMul", ["mean", "w1"], ["h0"]),
                Node("Add", ["h0", "b1"], ["h1"]),
                Node("Relu", ["h1"], ["h2"]),
                Node("MatMul", ["h2", "w2"], ["z0"]),
                Node("Add", ["z0", "b2"], ["z1"]),
                Node("Sigmoid", ["z1"], ["probability"]),
            ],
            takes=[Port("features", INT64, ["n"])],
            gives=[Port("probability", FLOAT, [1])],
            constants={
                "table": np.round(table / scale).astype(np.int8),
                "scale": np.array([scale], np.float32),
                "w1": self._w1.value,
                "b1": self._b1.value,
                "w2": self._w2.value,
                "b2": self._b2.value,
                "axis": np.array([0], np.int64),
            },
        )

    def _step(self, bags: Sequence[NDArray[np.int64]], truth: Reals, rate: float) -> float:
        """One batch of AdamW on the cross entropy; the loss before it."""
        touched, places = np.unique(np.concatenate(bags), return_inverse=True)
        shares = np.zeros((len(bags), len(touched)), np.float32)
        texts = np.repeat(np.arange(len(bags)), [len(bag) for bag in bags])
        np.add.at(shares, (texts, places), 1.0)
        shares /= shares.sum(axis=1, keepdims=True)
        kept = (self._draw.random((len(bags), WIDTH)) >= DROPOUT).astype(np.float32) / np.float32(1 - DROPOUT)
        means = (shares @ self._table.value[touched]) * kept
        hidden = np.maximum(means @ self._w1.value + self._b1.value, 0)
        odds = (hidden @ self._w2.value + self._b2.value)[:, 0]
        loss = np.logaddexp(0, odds) - truth * odds
        d_odds = ((1 / (1 + np.exp(-odds)) - truth) / len(bags))[:, None].astype(np.float32)
        d_hidden = (d_odds @ self._w2.value.T) * (hidden > 0)
        d_means = (d_hidden @ self._w1.value.T) * kept
        self._w2.step(hidden.T @ d_odds, rate)
        self._b2.step(d_odds.sum(axis=0), rate)
        self._w1.step(means.T @ d_hidden, rate)
        self._b1.step(d_hidden.sum(axis=0), rate)
        self._table.step(shares.T @ d_means, rate, touched)
        return float(loss.mean())


def _normal(draw: np.random.Generator, shape: tuple[int, int], deviation: float) -> Reals:
    return (draw.standard_normal(shape) * deviation).astype(np.float32)


def _area(told: NDArray[np.float64], truth: NDArray[np.bool_]) -> float:
    """0 where one side is empty: there is nothing to tell apart."""
    return auroc(told[~truth].tolist(), told[truth].tolist()) or 0.0
