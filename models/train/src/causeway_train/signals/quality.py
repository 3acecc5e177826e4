"""Training of `edge.quality` on the device model's graded answers, and its ONNX graph.

Hashed words → mean of their rows → two layers → log odds, then a slope and an offset (Platt scaling). It is trained on
the answers to training rows. The device's model was trained on those rows too and answers them better than others, so
the calibration is fitted on rows that were held back from the model, and measured on other held-back rows. It needs no
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from causeway_server.models.signals.drift import calibration_error
from causeway_server.models.signals.quality import BUCKETS, QualityEstimator, features

from ..calibrate.fit import fit_logistic
from ..calibrate.routing_curves import Array64
from ..evaluate.assistant import auroc
from ..function_calls.dataset import is_held_out
from ..onnx_writer import FLOAT, INT64, Node, Port, write_onnx
from .graded_answers import GradedAnswer, traffic_weights
from .optimizers import Adam, Array32

WIDTH, HIDDEN, EPOCHS, BATCH = 32, 16, 4, 256
RATE, DECAY, DROPOUT = 3e-3, 1e-2, 0.1
HALVES = "calibrate"  # seed that divides held-back rows into those for calibration and those for measuring


class QualityMetrics(msgspec.Struct, frozen=True):
    """Metrics on held-back prompts that neither training nor calibration used.

    The field names are keys in the manifests of shipped signals.
    """

    auroc: float
    # expected calibration error over ten equal bins, weighted to the mix of traffic that the calibration assumes
    ece: float
    own_auroc: float  # AUROC on in-domain prompts alone
    own_ece: float
    right: float  # share of prompts that the model answers correctly
    rows: int

    def metrics(self) -> dict[str, float]:
        """Return all figures as one mapping, for a manifest."""
        figures: dict[str, float] = msgspec.structs.asdict(self)
        return figures


def halves(held: Sequence[GradedAnswer]) -> tuple[list[GradedAnswer], list[GradedAnswer]]:
    """Divide held-back prompts into those for calibration and those for measuring, by a hash of the text."""
    first = [one for one in held if is_held_out(one.text, HALVES, 0.5)]
    return first, [one for one in held if not is_held_out(one.text, HALVES, 0.5)]


def train_quality(
    training: Sequence[GradedAnswer],
    held: Sequence[GradedAnswer],
    target: Path,
    *,
    seed: int,
    epochs: int = EPOCHS,
    progress: Callable[[str], None] = lambda _: None,
) -> QualityMetrics:
    """Train on `training`, calibrate on one half of `held`, write the graph to `target`, measure on the other half."""
    network = QualityNetwork(np.random.default_rng(seed))
    network.train(training, epochs, progress)
    first, second = halves(held)
    # Platt 1999: a slope and an offset on the log odds.
    odds = network.log_odds([one.text for one in first])
    line = fit_logistic(odds[:, None], correctness(first), traffic_weights(first))
    network.rescale(line.weights[0], line.bias)
    network.write(target)
    quality = QualityEstimator(target)
    return measure(np.array([quality(one.text) for one in second]), second)


def measure(probabilities: Array64, graded: Sequence[GradedAnswer]) -> QualityMetrics:
    """Return how well `probabilities` [graded] predict correct answers."""
    truth, in_domain = correctness(graded), np.array([one.in_domain for one in graded], bool)
    return QualityMetrics(
        auroc=_auroc(probabilities, truth),
        ece=calibration_error(probabilities, truth, traffic_weights(graded)),
        own_auroc=_auroc(probabilities[in_domain], truth[in_domain]),
        own_ece=calibration_error(probabilities[in_domain], truth[in_domain]),
        right=float(truth.mean()),
        rows=len(truth),
    )


def correctness(graded: Sequence[GradedAnswer]) -> NDArray[np.bool_]:
    return np.array([one.correct for one in graded], bool)


class QualityNetwork:
    """The network, with handwritten gradients."""

    def __init__(self, draw: np.random.Generator) -> None:
        self._draw = draw
        self._table = Adam(_normal(draw, (BUCKETS, WIDTH), 0.1), decay=DECAY)
        self._w1, self._b1 = (
            Adam(_normal(draw, (WIDTH, HIDDEN), WIDTH**-0.5), decay=DECAY),
            Adam(np.zeros(HIDDEN, np.float32)),
        )
        self._w2, self._b2 = Adam(_normal(draw, (HIDDEN, 1), HIDDEN**-0.5), decay=DECAY), Adam(np.zeros(1, np.float32))

    def log_odds(self, texts: Sequence[str]) -> Array64:
        """Return the log odds [texts] of a correct answer."""
        means = np.stack([self._table.value[features(text)].mean(axis=0) for text in texts])
        hidden = np.maximum(means @ self._w1.value + self._b1.value, 0)
        odds: Array64 = (hidden @ self._w2.value + self._b2.value)[:, 0].astype(np.float64)
        return odds

    def train(self, graded: Sequence[GradedAnswer], epochs: int, progress: Callable[[str], None]) -> None:
        """Train with AdamW on the cross entropy; the learning rate falls linearly."""
        bags = [features(one.text) for one in graded]
        truth = correctness(graded).astype(np.float32)
        for epoch in range(epochs):
            order = self._draw.permutation(len(bags))
            rate = RATE * (1 - epoch / epochs)
            batches = np.array_split(order, -(-len(order) // BATCH))
            losses = [self._step([bags[i] for i in batch], truth[batch], rate) for batch in batches]
            progress(f"edge.quality: epoch {epoch + 1} of {epochs}, loss {np.mean(losses):.3f}")

    def rescale(self, slope: float, offset: float) -> None:
        """Fold a slope and an offset on the log odds into the last layer."""
        self._w2.value *= np.float32(slope)
        self._b2.value[:] = self._b2.value * np.float32(slope) + np.float32(offset)

    def write(self, path: Path) -> None:
        """Write the graph features int64 [n] → probability float32 [1], with the table in int8 and one scale."""
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
            inputs=[Port("features", INT64, ["n"])],
            outputs=[Port("probability", FLOAT, [1])],
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

    def _step(self, bags: Sequence[NDArray[np.int64]], truth: Array32, rate: float) -> float:
        """Train on one batch; return the loss before the update."""
        touched, columns = np.unique(np.concatenate(bags), return_inverse=True)
        shares = np.zeros((len(bags), len(touched)), np.float32)
        texts = np.repeat(np.arange(len(bags)), [len(bag) for bag in bags])
        np.add.at(shares, (texts, columns), 1.0)
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


def _normal(draw: np.random.Generator, shape: tuple[int, int], deviation: float) -> Array32:
    return (draw.standard_normal(shape) * deviation).astype(np.float32)


def _auroc(probabilities: Array64, truth: NDArray[np.bool_]) -> float:
    """Return the AUROC, 0 if one side is empty."""
    return auroc(probabilities[~truth].tolist(), probabilities[truth].tolist()) or 0.0
