"""Measured figures of a model, as `causeway-models evaluate --json` writes them."""

from __future__ import annotations

import msgspec


class GroupResult(msgspec.Struct, frozen=True):
    """Shares of 1 over `rows` utterances of one group; `refused` is the share that the model wanted to turn away."""

    group: str
    rows: int
    intent: float
    exact: float
    valid: float
    refused: float


class EvaluationReport(msgspec.Struct, frozen=True):
    """What one model did with one set of rows, one entry per group, and its power to tell its own domain from the
    rest.
    """

    model: str
    grammar: bool
    results: tuple[GroupResult, ...]
    refusal_auroc: float | None  # probability of the refusal token, own domain against the rest

    def metrics(self, prefix: str = "") -> dict[str, float]:
        flat: dict[str, float] = {}
        for result in self.results:
            for measure in ("intent", "exact", "valid", "refused"):
                flat[f"{prefix}{result.group}/{measure}"] = round(getattr(result, measure), 4)
            flat[f"{prefix}{result.group}/rows"] = result.rows
        if self.refusal_auroc is not None:
            flat[f"{prefix}refusal_auroc"] = round(self.refusal_auroc, 4)
        return flat
