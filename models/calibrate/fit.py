"""Fit the two signals of a pair on labelled answers: ridge logistic regressions whose penalties cross-validation picks.

Every figure of a report comes from predictions on rows that neither the fit nor the choice of penalties and thresholds
saw: the rows are divided into folds, and everything is done anew on the others (`predict_unseen`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..signals.calibration import LinearLogit, log_odds
from ..signals.pair import STRUCTURE, PairStage, handoff_inputs, has_choices
from ..train.signals.optimizers import Array64, fit_logistic
from .label import LabelledAnswer

FOLDS = 5
ROWS_PER_AXIS, MOST_AXES = 100, 64  # of the encoder's vectors: fewer rows tell fewer apart
_TASK_RIDGE = 0.1
_QUALITY_RIDGES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
_HANDOFF_RIDGES = (0.01, 0.1, 1.0, 10.0, 1000.0)  # the last one leaves `edge.quality` alone
_FREE = 1e-6  # penalty of `edge.quality` as an input of a handoff
_EVEN = 1e-9

Indices = NDArray[np.int64]


class Rows(msgspec.Struct, frozen=True):
    """Labelled answers as arrays, [rows] each."""

    answers: Sequence[LabelledAnswer]
    inputs: Array64  # of `edge.quality`, [rows, inputs]
    small: Array64
    large: Array64

    @property
    def enough(self) -> NDArray[np.bool_]:
        """Whether the small model's answer is good enough."""
        return self.small >= self.large - _EVEN

    @property
    def strata(self) -> list[tuple[str, float, float]]:
        """What each fold gets its part of: the task, and both qualities."""
        tasks = [answer.task for answer in self.answers]
        return list(zip(tasks, self.small.tolist(), self.large.tolist(), strict=True))

    def __getitem__(self, indices: Indices) -> Rows:
        answers = [self.answers[index] for index in indices]
        return Rows(answers, self.inputs[indices], self.small[indices], self.large[indices])

    def __len__(self) -> int:
        return len(self.answers)


class PairFit(msgspec.Struct, frozen=True):
    """Both signals, and their values for the rows that they were fitted on, each by a fit without the row's fold."""

    quality: LinearLogit
    stages: tuple[PairStage, ...]
    quality_unseen: Array64  # probabilities [rows]
    stages_unseen: tuple[Array64, ...]  # of each stage


class Unseen(msgspec.Struct, frozen=True):
    """Predictions of all rows, by fits that did not see them: probabilities [rows]."""

    quality: Array64
    stages: tuple[Array64, ...]
    folds: tuple[tuple[Indices, PairFit], ...]  # the rows predicted by each fit


def fit_pair(rows: Rows, tokens: Sequence[int], seed: int) -> PairFit:
    """Fit `edge.quality`, then the confidence after each number of `tokens` with `edge.quality` as an input."""
    axes = _axes(rows)
    reduced = rows.inputs @ axes
    shapes = [[ridge] * axes.shape[1] for ridge in _QUALITY_RIDGES]
    folds = folds_of(rows.strata, seed)
    quality, unseen = _fit_best(reduced, rows.enough, shapes, folds)
    quality = LinearLogit(tuple((axes @ np.array(quality.weights)).tolist()), quality.bias)
    stages, stages_unseen = [], []
    for count in tokens:
        inputs = stage_inputs(rows, count, unseen)
        shapes = [[ridge] * (inputs.shape[1] - 1) + [_FREE] for ridge in _HANDOFF_RIDGES]
        logit, predicted = _fit_best(inputs, rows.enough, shapes, folds)
        stages.append(PairStage(count, logit))
        stages_unseen.append(predicted)
    return PairFit(quality, tuple(stages), unseen, tuple(stages_unseen))


def predict_unseen(rows: Rows, tokens: Sequence[int], seed: int, tick: Callable[[], None] = lambda: None) -> Unseen:
    """Fit once per fold, on the rows outside it, and predict the rows in it."""
    quality, stages = np.zeros(len(rows)), [np.zeros(len(rows)) for _ in tokens]
    folds = []
    for held in folds_of(rows.strata, seed):
        seen = np.setdiff1d(np.arange(len(rows)), held)
        fitted = fit_pair(rows[seen], tokens, seed + 1)
        part = rows[held]
        quality[held] = predict(fitted.quality, part.inputs)
        for stage, values in zip(fitted.stages, stages, strict=True):
            values[held] = predict(stage.logit, stage_inputs(part, stage.tokens, quality[held]))
        folds.append((held, fitted))
        tick()
    return Unseen(quality, tuple(stages), tuple(folds))


def stage_inputs(rows: Rows, tokens: int, quality: Array64) -> Array64:
    """Return the inputs of the stage after `tokens` tokens, [rows, inputs]."""
    values = []
    for row, probability in zip(rows.answers, quality.tolist(), strict=True):
        length = len(row.confidences)
        confidence = row.confidences[min(tokens, length) - 1]
        values.append(handoff_inputs(confidence, length <= tokens, log_odds(probability), has_choices(row.text)))
    return np.array(values)


def predict(logit: LinearLogit, inputs: Array64) -> Array64:
    """Return probabilities [rows]."""
    odds = inputs @ np.array(logit.weights) + logit.bias
    probabilities: Array64 = 1 / (1 + np.exp(-np.clip(odds, -30, 30)))
    return probabilities


def folds_of(strata: Sequence[object], seed: int) -> list[Indices]:
    """Divide rows into `FOLDS` folds by chance, each with its part of every stratum.

    Without strata a fold with many good answers would be predicted by rows that have few, and rank last.
    """
    shuffled = np.random.default_rng(seed).permutation(len(strata))
    order = np.array(sorted(shuffled.tolist(), key=lambda row: str(strata[row])))
    return [np.sort(order[start::FOLDS]) for start in range(FOLDS)]


def _axes(rows: Rows) -> Array64:
    """Return what maps the inputs of `edge.quality` to fewer ones: [inputs, fewer].

    The leading principal axes of the vector, beside those that tell the tasks apart, or the structural inputs where
    there is one task.
    """
    width = rows.inputs.shape[1]
    vectors = rows.inputs[:, STRUCTURE:]
    _, _, directions = np.linalg.svd(vectors - vectors.mean(axis=0), full_matrices=False)
    count = min(max(1, len(rows) // ROWS_PER_AXIS), MOST_AXES, len(directions))
    principal = np.zeros((width, count))
    principal[STRUCTURE:] = directions[:count].T
    tasks = np.array([row.task for row in rows.answers])
    names = np.unique(tasks)
    guiding = np.eye(width)[:, :STRUCTURE] if len(names) == 1 else _task_axes(rows.inputs, tasks[:, None] == names)
    return np.concatenate([guiding, principal], axis=1)


def _task_axes(inputs: Array64, is_task: NDArray[np.bool_]) -> Array64:
    """Return ridge regressions from the inputs to each task's indicator, which span the axes of a linear discriminant.

    Args:
        inputs: [rows, inputs].
        is_task: [rows, tasks].
    """
    spread = inputs.std(axis=0) + 1e-9
    scaled = (inputs - inputs.mean(axis=0)) / spread
    indicators = is_task - is_task.mean(axis=0)
    gram = scaled.T @ scaled + _TASK_RIDGE * len(inputs) * np.eye(scaled.shape[1])
    axes: Array64 = np.linalg.solve(gram, scaled.T @ indicators) / spread[:, None]
    return axes


def _fit_best(
    inputs: Array64, truth: NDArray[np.bool_], ridges: Sequence[Sequence[float]], folds: Sequence[Indices]
) -> tuple[LinearLogit, Array64]:
    """Fit with one of the penalties, and return the predictions of unseen rows too.

    The choice is the largest penalty that is within one standard error of the one that predicts unseen rows best
    (Breiman et al. 1984): a few hundred rows rarely tell more.

    Args:
        ridges: penalties of the inputs, ascending.
    """
    candidates = [_unseen(inputs, truth, ridge, folds) for ridge in ridges]
    losses = np.stack([_log_losses(candidate, truth) for candidate in candidates])
    excess = losses - losses[losses.mean(axis=1).argmin()]
    within = excess.mean(axis=1) <= excess.std(axis=1) / len(truth) ** 0.5
    best = int(np.flatnonzero(within).max())
    unseen = candidates[best]
    # Platt 1999: penalties pull probabilities to the mean; a slope and an offset undo that.
    odds = np.log(unseen / (1 - unseen))
    ones = np.ones(len(truth))
    line = fit_logistic(odds[:, None], truth, ones)
    fitted = fit_logistic(inputs, truth, ones, ridges=ridges[best])
    slope = max(line.weights[0], 0.0)
    logit = LinearLogit(tuple(slope * weight for weight in fitted.weights), slope * fitted.bias + line.bias)
    return logit, predict(LinearLogit((slope,), line.bias), odds[:, None])


def _unseen(inputs: Array64, truth: NDArray[np.bool_], ridges: Sequence[float], folds: Sequence[Indices]) -> Array64:
    predicted = np.zeros(len(inputs))
    for held in folds:
        seen = np.setdiff1d(np.arange(len(inputs)), held)
        predicted[held] = predict(
            fit_logistic(inputs[seen], truth[seen], np.ones(len(seen)), ridges=ridges), inputs[held]
        )
    return np.clip(predicted, 1e-4, 1 - 1e-4)


def _log_losses(predicted: Array64, truth: NDArray[np.bool_]) -> Array64:
    losses: Array64 = -np.log(np.where(truth, predicted, 1 - predicted))
    return losses
