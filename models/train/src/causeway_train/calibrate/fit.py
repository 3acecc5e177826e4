"""Fitting of a pair's two signals on labelled answers, by ridge logistic regressions. Cross-validation chooses the
penalties.

A few hundred prompts mostly show how well both models do on each kind of prompt. If the prompts have several tasks,
`edge.quality` therefore starts from the task that a prompt probably belongs to and the small model's gain on that task
(`KindMixture`). Other features of the prompt count only as far as unseen rows confirm them.

Every figure of a report comes from predictions on rows that neither the fit nor the choice of penalties and thresholds
saw: the rows are divided into folds, and everything is repeated on the others (`predict_unseen`).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from causeway_server.models.signals.calibration import LinearLogit, log_odds
from causeway_server.models.signals.pair import GoldenAnswer, KindMixture, PairParameters, PairStage, handoff_inputs
from causeway_server.models.signals.structure import CHOICES_INPUT, STRUCTURE

from .prompts import LabelledAnswer
from .routing_curves import Array64

FOLDS = 5
ROWS_PER_AXIS, MAX_AXES = 100, 64  # of the encoder's vectors: fewer rows tell fewer apart
_KIND_RIDGE = 0.03
_KIND_PRIOR = 10  # rows of the mean of all tasks that the mean of a task counts beside its own
_QUALITY_RIDGES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
_MAX_RIDGE = 10.0  # of what is added to the gain of the kind: it still tells prompts of one kind apart
_HANDOFF_RIDGES = (0.01, 0.1, 1.0, 10.0, 1000.0)  # the last one leaves `edge.quality` alone
_FREE = 1e-6  # penalty of the kinds' gain as an input of `edge.quality`, and of `edge.quality` as one of a handoff
_EVEN = 1e-9
_MIN_RIDGE = 1e-4  # penalty of an input that has no other
_NEWTON_STEPS = 60
_GOLDEN = 300  # golden answers of a pair's file: less than 20 KB

Indices = NDArray[np.int64]


class Unanswered(msgspec.Struct, frozen=True):
    """Prompts that have no answers yet. They help to learn how the tasks differ, as answered prompts do."""

    tasks: Sequence[str]
    inputs: Array64  # [prompts, inputs]


class Rows(msgspec.Struct, frozen=True):
    """Labelled answers as arrays, [rows] each."""

    answers: Sequence[LabelledAnswer]
    inputs: Array64  # inputs of `edge.quality`, [rows, inputs]
    small: Array64
    large: Array64
    unanswered: Unanswered | None = None

    @property
    def enough(self) -> NDArray[np.bool_]:
        """Whether the small model's answer is good enough."""
        return self.small >= self.large - _EVEN

    @property
    def weights(self) -> Array64:
        """The number of prompts that each row represents."""
        return np.array([answer.weight for answer in self.answers])

    @property
    def strata(self) -> list[tuple[str, float, float]]:
        """The strata of the folds: the task, and both qualities."""
        tasks = [answer.task for answer in self.answers]
        return list(zip(tasks, self.small.tolist(), self.large.tolist(), strict=True))

    def __getitem__(self, indices: Indices) -> Rows:
        answers = [self.answers[index] for index in indices]
        return Rows(answers, self.inputs[indices], self.small[indices], self.large[indices], self.unanswered)

    def __len__(self) -> int:
        return len(self.answers)


class PairFit(msgspec.Struct, frozen=True):
    """Both signals, and the value of each signal for each row by a fit that did not see the row."""

    kinds: KindMixture | None  # None if all prompts have one task
    quality: LinearLogit
    stages: tuple[PairStage, ...]
    quality_unseen: Array64  # probabilities [rows]
    stages_unseen: tuple[Array64, ...]  # probabilities [rows] of each stage


class Unseen(msgspec.Struct, frozen=True):
    """Predictions of all rows, by fits that did not see them: probabilities [rows]."""

    quality: Array64
    stages: tuple[Array64, ...]
    folds: tuple[tuple[Indices, PairFit], ...] = ()  # the rows that each fit predicted; empty for published signals


def fit_pair(rows: Rows, tokens: Sequence[int], seed: int) -> PairFit:
    """Fit `edge.quality`, then the confidence after each number of `tokens` with `edge.quality` as an input."""
    folds = folds_of(rows.strata, seed)
    kinds, gains = _fit_kinds(rows, folds)
    axes = _axes(rows.inputs)
    reduced, shapes = rows.inputs @ axes, [[ridge] * axes.shape[1] for ridge in _QUALITY_RIDGES]
    if kinds is not None:
        reduced = np.concatenate([reduced, gains[:, None]], axis=1)
        shapes = [[*shape, _FREE] for shape in (*shapes, [_MAX_RIDGE] * axes.shape[1])]
    fitted, unseen = _fit_best(reduced, rows.enough, shapes, folds)
    weights = np.array(fitted.weights)
    width = axes.shape[1]
    quality = LinearLogit((*(axes @ weights[:width]).tolist(), *weights[width:].tolist()), fitted.bias)
    stages, stages_unseen = [], []
    for count in tokens:
        inputs = stage_inputs(rows, count, unseen)
        shapes = [[ridge] * (inputs.shape[1] - 1) + [_FREE] for ridge in _HANDOFF_RIDGES]
        logit, predicted = _fit_best(inputs, rows.enough, shapes, folds)
        stages.append(PairStage(count, logit))
        stages_unseen.append(predicted)
    return PairFit(kinds, quality, tuple(stages), unseen, tuple(stages_unseen))


def predict_unseen(rows: Rows, tokens: Sequence[int], seed: int) -> Unseen:
    """Fit once per fold, on the rows outside it, and predict the rows in it."""
    quality, stages = np.zeros(len(rows)), [np.zeros(len(rows)) for _ in tokens]
    folds = []
    for held in folds_of(rows.strata, seed):
        seen = np.setdiff1d(np.arange(len(rows)), held)
        fitted = fit_pair(rows[seen], tokens, seed + 1)
        part = rows[held]
        quality[held] = predict(fitted.quality, quality_inputs(fitted.kinds, part.inputs))
        for stage, values in zip(fitted.stages, stages, strict=True):
            values[held] = predict(stage.logit, stage_inputs(part, stage.tokens, quality[held]))
        folds.append((held, fitted))
    return Unseen(quality, tuple(stages), tuple(folds))


def golden_answers(rows: Rows, unseen: Unseen, kinds: KindMixture | None, seed: int) -> tuple[GoldenAnswer, ...]:
    """Return a random part of the rows as golden answers, with the last stage's predictions."""
    chosen = np.sort(np.random.default_rng(seed).permutation(len(rows))[:_GOLDEN])
    inputs, found = rows.inputs[chosen], np.zeros(len(chosen), np.int64)
    if kinds is not None:
        found = np.stack([predict(kind, inputs) for kind in kinds.kinds], axis=1).argmax(axis=1)
    quality, confidence = (unseen.quality[chosen].tolist(), unseen.stages[-1][chosen].tolist())
    return tuple(
        GoldenAnswer(kind, round(log_odds(first), 2), round(log_odds(second), 2), good)
        for kind, first, second, good in zip(
            found.tolist(), quality, confidence, rows.enough[chosen].tolist(), strict=True
        )
    )


def predict_published(published: PairParameters, rows: Rows) -> Unseen:
    """Predict rows with the signals of an artifact."""
    quality = predict(published.quality, quality_inputs(published.kinds, rows.inputs))
    stages = (predict(stage.logit, stage_inputs(rows, stage.tokens, quality)) for stage in published.stages)
    return Unseen(quality, tuple(stages))


def quality_inputs(kinds: KindMixture | None, inputs: Array64) -> Array64:
    """Return the inputs of `edge.quality`, [rows, inputs]: the prompt's features, and the expected gain for its
    kind.
    """
    return inputs if kinds is None else np.concatenate([inputs, _gains(kinds, inputs)[:, None]], axis=1)


def stage_inputs(rows: Rows, tokens: int, quality: Array64) -> Array64:
    """Return the inputs of the stage after `tokens` tokens, [rows, inputs]."""
    values = []
    choices = rows.inputs[:, CHOICES_INPUT] > 0
    for row, probability, has_choices in zip(rows.answers, quality.tolist(), choices.tolist(), strict=True):
        length = len(row.confidences)
        confidence, ended = row.confidences[min(tokens, length) - 1], row.confidences_end and length <= tokens
        values.append(handoff_inputs(confidence, ended, log_odds(probability), has_choices))
    return np.array(values)


def predict(logit: LinearLogit, inputs: Array64) -> Array64:
    """Return probabilities [rows]."""
    odds = inputs @ np.array(logit.weights) + logit.bias
    probabilities: Array64 = 1 / (1 + np.exp(-np.clip(odds, -30, 30)))
    return probabilities


def folds_of(strata: Sequence[object], seed: int) -> list[Indices]:
    """Divide rows into `FOLDS` random folds, each with the same share of every stratum.

    Without strata, the rows outside a fold with many good answers have few of them, so that fold's rows would be
    predicted too low.
    """
    shuffled = np.random.default_rng(seed).permutation(len(strata))
    order = np.array(sorted(shuffled.tolist(), key=lambda row: str(strata[row])))
    return [np.sort(order[start::FOLDS]) for start in range(FOLDS)]


def _axes(inputs: Array64) -> Array64:
    """Return a matrix that projects the inputs of `edge.quality` to fewer ones: [inputs, fewer].

    It keeps the structural inputs, and the leading principal axes of the sentence vector.
    """
    vectors = inputs[:, STRUCTURE:]
    _, _, directions = np.linalg.svd(vectors - vectors.mean(axis=0), full_matrices=False)
    count = min(max(1, len(inputs) // ROWS_PER_AXIS), MAX_AXES, len(directions))
    principal = np.zeros((inputs.shape[1], count))
    principal[STRUCTURE:] = directions[:count].T
    return np.concatenate([np.eye(inputs.shape[1])[:, :STRUCTURE], principal], axis=1)


def _fit_kinds(rows: Rows, folds: Sequence[Indices]) -> tuple[KindMixture | None, Array64]:
    """Return the mixture of the tasks, and its gain for each row by a fit without the row's fold."""
    unseen = np.zeros(len(rows))
    whole = _kinds_of(rows)
    if whole is None:
        return None, unseen
    for held in folds:
        part = _kinds_of(rows[np.setdiff1d(np.arange(len(rows)), held)]) or whole
        unseen[held] = _gains(part, rows.inputs[held])
    return whole, unseen


def _kinds_of(rows: Rows) -> KindMixture | None:
    """Fit one regression for each task against all others; None if there is only one task."""
    tasks, gains = np.array([row.task for row in rows.answers]), rows.small - rows.large
    names = np.unique(tasks)
    if len(names) == 1:
        return None
    inputs, tasks_of_inputs = rows.inputs, tasks
    if rows.unanswered is not None:
        inputs = np.concatenate([inputs, rows.unanswered.inputs])
        tasks_of_inputs = np.concatenate([tasks, rows.unanswered.tasks])
    center, spread = inputs.mean(axis=0), inputs.std(axis=0) + _EVEN
    scaled = (inputs - center) / spread
    kinds, means = [], []
    for name in names:
        inside = tasks == name
        fitted = fit_logistic(scaled, tasks_of_inputs == name, ridges=[_KIND_RIDGE] * scaled.shape[1])
        weights = np.array(fitted.weights) / spread
        kinds.append(LinearLogit(tuple(weights.tolist()), fitted.bias - float(weights @ center)))
        means.append((gains[inside].sum() + _KIND_PRIOR * gains.mean()) / (inside.sum() + _KIND_PRIOR))
    return KindMixture(tuple(kinds), tuple(map(float, means)))


def _gains(kinds: KindMixture, inputs: Array64) -> Array64:
    """Return the gain that `kinds` expects for each row."""
    shares = np.stack([predict(kind, inputs) for kind in kinds.kinds], axis=1)
    expected: Array64 = shares @ np.array(kinds.gains) / shares.sum(axis=1)
    return expected


def _fit_best(
    inputs: Array64, truth: NDArray[np.bool_], ridges: Sequence[Sequence[float]], folds: Sequence[Indices]
) -> tuple[LinearLogit, Array64]:
    """Fit with one of the penalties, and return the predictions of unseen rows too.

    The largest penalty whose loss on unseen rows is within one standard error of the best is chosen (Breiman et al.
    1984): a few hundred rows rarely justify a smaller one.

    Args:
        ridges: Penalties of the inputs, ascending.
    """
    candidates = [_unseen(inputs, truth, ridge, folds) for ridge in ridges]
    losses = np.stack([-np.log(np.where(truth, candidate, 1 - candidate)) for candidate in candidates])
    excess = losses - losses[losses.mean(axis=1).argmin()]
    within = excess.mean(axis=1) <= excess.std(axis=1) / len(truth) ** 0.5
    best = int(np.flatnonzero(within).max())
    unseen = candidates[best]
    # Platt 1999: penalties pull probabilities to the mean; a slope and an offset undo that.
    odds = np.log(unseen / (1 - unseen))
    line = fit_logistic(odds[:, None], truth)
    fitted = fit_logistic(inputs, truth, ridges=ridges[best])
    slope = max(line.weights[0], 0.0)
    logit = LinearLogit(tuple(slope * weight for weight in fitted.weights), slope * fitted.bias + line.bias)
    return logit, predict(LinearLogit((slope,), line.bias), odds[:, None])


def _unseen(inputs: Array64, truth: NDArray[np.bool_], ridges: Sequence[float], folds: Sequence[Indices]) -> Array64:
    predicted = np.zeros(len(inputs))
    for held in folds:
        seen = np.setdiff1d(np.arange(len(inputs)), held)
        predicted[held] = predict(fit_logistic(inputs[seen], truth[seen], ridges=ridges), inputs[held])
    return np.clip(predicted, 1e-4, 1 - 1e-4)


def fit_logistic(
    inputs: Array64, truth: NDArray[np.bool_] | Array64, weights: Array64 | None = None, ridges: Sequence[float] = ()
) -> LinearLogit:
    """Fit a logistic regression by Newton's method on standardised inputs.

    Args:
        inputs: [rows, inputs].
        truth: [rows], 0 to 1.
        weights: [rows], of each row in the loss; default: all the same.
        ridges: One L2 penalty per input; default: a small one for all.
    """
    counts = np.ones(len(inputs)) if weights is None else weights
    mean, spread = inputs.mean(axis=0), inputs.std(axis=0) + 1e-9
    scaled = np.concatenate([(inputs - mean) / spread, np.ones((len(inputs), 1))], axis=1)
    ridge = len(inputs) * np.diag([*(ridges or [_MIN_RIDGE] * inputs.shape[1]), 1e-6])
    line = np.zeros(scaled.shape[1])
    for _ in range(_NEWTON_STEPS):
        predicted = 1 / (1 + np.exp(-np.clip(scaled @ line, -30, 30)))
        hessian = (scaled * (counts * predicted * (1 - predicted))[:, None]).T @ scaled + ridge
        step = np.linalg.solve(hessian, scaled.T @ (counts * (predicted - truth)) + ridge @ line)
        line = line - step
        if float(np.abs(step).max()) < 1e-8:
            break
    slopes = line[:-1] / spread
    return LinearLogit(tuple(float(slope) for slope in slopes), float(line[-1] - slopes @ mean))
