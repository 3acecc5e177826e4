"""The report that `causeway-train evaluate --format json` prints."""

from __future__ import annotations

import msgspec


class GroupResult(msgspec.Struct, frozen=True):
    """Shares (0..1) over the `rows` rows of one group.

    `intent`: the function is correct; `exact`: every argument too; `valid`: the answer parses as a call; `refused`: the
    refusal token is likelier than not.
    """

    group: str
    rows: int
    intent: float
    exact: float
    valid: float
    refused: float


class EvaluationReport(msgspec.Struct, frozen=True):
    """Results of one model, by group of rows, and how well its refusals separate in-domain from other requests."""

    model: str
    grammar: bool
    results: tuple[GroupResult, ...]
    # AUROC of refusals by the probability of the refusal token; None for a model without that token
    refusal_auroc: float | None

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Return all figures as one mapping, for a manifest: `{prefix}{group}/{measure}`."""
        flat: dict[str, float] = {}
        for result in self.results:
            for measure in ("intent", "exact", "valid", "refused"):
                flat[f"{prefix}{result.group}/{measure}"] = round(getattr(result, measure), 4)
            flat[f"{prefix}{result.group}/rows"] = result.rows
        if self.refusal_auroc is not None:
            flat[f"{prefix}refusal_auroc"] = round(self.refusal_auroc, 4)
        return flat
