"""Fit the estimates of `best_of` on graded answers of any number of models, and measure them on rows of their own.

The rows are divided by chance: on the first part each estimator is fitted, the second part chooses among them by the
mean log loss, and the chosen one is fitted again on both. The third part is used for nothing but the report: its
figures are those of the published file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from causeway_server.models.catalog.artifact import (
    Artifact,
    ArtifactError,
    ArtifactNotFound,
    DataSource,
    find_artifact,
    find_signal,
)
from causeway_server.models.comparison.prompts import read_lines
from causeway_server.models.signals.candidates import KIND, CandidateModel, CandidateParameters, Logistic, Neighbours
from causeway_server.models.signals.drift import calibration_error
from causeway_server.models.signals.encoder import SentenceEncoder
from causeway_server.models.signals.pair import ModelIdentity, prompt_features

from ..publish_signal import SignalMetadata, publish_signal
from .fit import Indices, fit_logistic, predict
from .routing_curves import Array64

MIN_ROWS = 100
_RIDGES = (0.01, 0.1, 1.0, 10.0)
_COUNTS, _PRIOR = (10, 30, 100), 5.0
_CLIP = 1e-3
_CONSTANT = "constant"


class GradedPrompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt, the grade of each model's answer (0 to 1), and the answers' lengths where they are known."""

    prompt: str
    grades: dict[str, float]
    tokens: dict[str, int] = {}


class CandidateReport(msgspec.Struct, frozen=True):
    """The figures of the rows that no fit and no choice saw.

    Attributes:
        losses: The mean log loss of each estimator on the rows that chose, by its name.
        chosen: The name of the chosen one.
        rows: The number of rows of the other figures.
        grades: The mean grade of each model's answers, by model.
        errors: The calibration error of each model's estimates.
        best: The mean grade if the model with the highest estimate answers.
        perfect: The mean grade if the best answer were known.
        chances: The share of prompts for which each model has the highest estimate.
    """

    losses: Mapping[str, float]
    chosen: str
    rows: int
    grades: Mapping[str, float]
    errors: Mapping[str, float]
    best: float
    perfect: float
    chances: Mapping[str, float]

    def lines(self) -> list[str]:
        """Return the report as Markdown."""
        losses = ", ".join(f"{name} {loss:.4f}" for name, loss in self.losses.items())
        table = [
            f"| {name} | {grade:.3f} | {self.errors[name]:.3f} | {self.chances[name]:.0%} |"
            for name, grade in self.grades.items()
        ]
        return [
            f"Log loss on the rows that chose: {losses}. Chosen: {self.chosen}.",
            "",
            f"On {self.rows} other rows:",
            "",
            "| model | mean grade | calibration error | chosen with `quality` alone |",
            "|---|---|---|---|",
            *table,
            "",
            f"Mean grade of the chosen model: {self.best:.3f}; of the best answer each time: {self.perfect:.3f}.",
        ]


class _Data(msgspec.Struct, frozen=True):
    """Rows as arrays: the inputs of a regression [rows, inputs], vectors [rows, dimensions], grades [rows, models]."""

    inputs: Array64
    vectors: Array64
    grades: Array64

    def __getitem__(self, indices: Indices) -> _Data:
        return _Data(self.inputs[indices], self.vectors[indices], self.grades[indices])


def read_graded(files: Sequence[Path]) -> tuple[GradedPrompt, ...]:
    """Read graded prompts, which all have grades of the same models.

    Raises:
        ArtifactError: A line is invalid, or too few rows are there.
    """
    example = '{"prompt": "...", "grades": {"small": 1, "large": 1}}'
    rows = read_lines(files, msgspec.json.Decoder(GradedPrompt).decode, example)
    models = rows[0].grades.keys()
    for number, row in enumerate(rows, start=1):
        if row.grades.keys() != models or not all(0.0 <= grade <= 1.0 for grade in row.grades.values()):
            raise ArtifactError(f"Row {number}: `grades` must have {', '.join(models)}, each from 0 to 1.")
    if len(rows) < MIN_ROWS or len(models) < 2:
        raise ArtifactError(
            f"There are {len(rows)} rows of {len(models)} models, but at least {MIN_ROWS} rows of 2 models are needed."
        )
    return tuple(rows)


def fit_candidates(
    rows: Sequence[GradedPrompt], encoder: SentenceEncoder, seed: int
) -> tuple[Logistic | Neighbours, CandidateReport]:
    """Fit and choose an estimator, and measure it on the rows that neither saw: half, a quarter, a quarter."""
    names = list(rows[0].grades)
    data = _Data(
        np.array([prompt_features(row.prompt, encoder) for row in rows]),
        np.array([encoder(row.prompt) for row in rows], np.float64),
        np.array([[row.grades[name] for name in names] for row in rows]),
    )
    order = np.random.default_rng(seed).permutation(len(rows))
    first, second = len(rows) // 2, len(rows) * 3 // 4
    fitting, choosing, rest = data[order[:first]], data[order[first:second]], data[order[second:]]
    shapes: dict[str, float] = {f"logistic, ridge {ridge:g}": ridge for ridge in _RIDGES}
    shapes |= {f"{count} neighbours": count for count in _COUNTS if count < first}
    constant = np.tile(fitting.grades.mean(axis=0), (len(choosing.grades), 1))
    losses = {_CONSTANT: _loss(constant, choosing.grades)}
    for name, shape in shapes.items():
        losses[name] = _loss(_estimates(_fit(name, shape, fitting), choosing), choosing.grades)
    chosen = min(shapes, key=losses.__getitem__)
    estimator = _fit(chosen, shapes[chosen], data[order[:second]])
    estimates = _estimates(estimator, rest)
    best = estimates.argmax(axis=1)
    return estimator, CandidateReport(
        losses,
        chosen,
        len(rest.grades),
        dict(zip(names, rest.grades.mean(axis=0).tolist(), strict=True)),
        {name: calibration_error(estimates[:, at], rest.grades[:, at] >= 0.5) for at, name in enumerate(names)},
        float(rest.grades[np.arange(len(best)), best].mean()),
        float(rest.grades.max(axis=1).mean()),
        {name: float((best == at).mean()) for at, name in enumerate(names)},
    )


def publish_candidates(
    rows: Sequence[GradedPrompt], to: Path, name: str, *, command: str, seed: int, sources: tuple[DataSource, ...] = ()
) -> tuple[Artifact, CandidateReport]:
    """Fit on the rows, and publish the estimates with their report.

    Args:
        rows: The graded prompts.
        to: The folder of models that is published to.
        name: The name of the artifact.
        command: The command that the manifest names.
        seed: Divides the rows.
        sources: The data that the manifest names.
    """
    encoder = find_signal("embedding", None, (to,))
    estimator, report = fit_candidates(rows, SentenceEncoder(encoder.path), seed)
    models = tuple(CandidateModel(_identity(model, to), _tokens(rows, model)) for model in rows[0].grades)
    parameters = CandidateParameters(1, models, encoder.manifest.sha256, estimator)
    to.mkdir(parents=True, exist_ok=True)
    weights = to / f"{name}.partial.json"
    weights.write_bytes(msgspec.json.encode(parameters))
    metadata = SignalMetadata(
        kind=KIND,
        architecture=report.chosen,
        quantisation="JSON numbers",
        command=command,
        note=f"This signal estimates the probability that each of {', '.join(rows[0].grades)} answers right.",
        metrics={"rows": float(report.rows), "best": report.best, "perfect": report.perfect},
        seed=seed,
        data=sources,
    )
    try:
        return publish_signal(weights, name, to, metadata, appendix=report.lines()), report
    finally:
        weights.unlink()


def _identity(model: str, folder: Path) -> ModelIdentity:
    try:
        return ModelIdentity(model, find_artifact(model, (folder,)).manifest.sha256)
    except ArtifactNotFound:
        return ModelIdentity(model)  # only an endpoint has the weights


def _tokens(rows: Sequence[GradedPrompt], model: str) -> float | None:
    lengths = [row.tokens[model] for row in rows if model in row.tokens]
    return sum(lengths) / len(lengths) if lengths else None


def _fit(name: str, shape: float, data: _Data) -> Logistic | Neighbours:
    if name.startswith("logistic"):
        ridges = [shape] * data.inputs.shape[1]
        return Logistic(tuple(fit_logistic(data.inputs, grades, ridges=ridges) for grades in data.grades.T))
    vectors = np.clip(np.rint(data.vectors * 127), -127, 127).astype(np.int8)
    return Neighbours(int(shape), _PRIOR, vectors.tobytes(), data.grades.T.astype(np.float32).tobytes())


def _estimates(estimator: Logistic | Neighbours, data: _Data) -> Array64:
    """Return probabilities [rows, models]."""
    if isinstance(estimator, Logistic):
        return np.stack([predict(logit, data.inputs) for logit in estimator.logits], axis=1)
    return np.array([estimator((), vector.astype(np.float32)) for vector in data.vectors])


def _loss(estimates: Array64, grades: Array64) -> float:
    clipped = np.clip(estimates, _CLIP, 1 - _CLIP)
    return float(-(grades * np.log(clipped) + (1 - grades) * np.log(1 - clipped)).mean())
