"""The evaluation of a calibrated pair on prompts that were not used for the fit, and its report.

Figures: APGR, calibration error, thresholds. The report has them and the policy line as Markdown, curves as SVG.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from causeway_server.models.signals.drift import calibration_error
from causeway_server.models.signals.pair import PairHandoff
from causeway_server.models.signals.structure import LENGTH_INPUT

from .fit import Indices, Rows, Unseen
from .routing_curves import Array64, apgr, chart, reliability, routing_curves

BOOTSTRAPS = 400
MIN_ROWS = 20  # of a task, from which it is judged by itself
_Z = 1.96

PROMPT, RAW, BOTH, LENGTH = "edge.quality", "confidence", "edge.quality + confidence", "short prompts"


Kept = NDArray[np.bool_]
_BY_KIND = "No single task is routable: the signals tell kinds of prompts apart, and nothing within a kind."
_WIDTH = 120  # of a line of prose


class Interval(msgspec.Struct, frozen=True):
    """An estimate with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


class Target(msgspec.Struct, frozen=True):
    """The owner's goal: `keep` a share of the large model's quality, or send `cloud_share` of the requests to the
    cloud.
    """

    keep: float | None = None
    cloud_share: float | None = None


class TaskReport(msgspec.Struct, frozen=True):
    """The figures of one task, or of all prompts together. APGR is None if the large model is not better."""

    name: str
    rows: int
    small: float
    large: float
    chance: float
    recovered: Mapping[str, Interval | None]  # APGR by signal

    @property
    def at_chance(self) -> bool:
        """Whether the small model is not measurably better than guessing."""
        error = _Z * math.sqrt(self.chance * (1 - self.chance) / self.rows)
        return self.chance > 0 and self.small <= self.chance + error

    @property
    def routable(self) -> bool:
        """Whether a calibrated signal is significantly better than random routing on this number of rows."""
        return any((found := self.recovered[name]) is not None and found.low > 0.5 for name in (PROMPT, BOTH))

    @property
    def verdict(self) -> str:
        """Advice about these prompts."""
        if self.recovered[BOTH] is None:
            return "nothing to route: the large model is not better"
        chance = f"the small model is not better than chance ({self.chance:.0%})" if self.at_chance else ""
        if self.routable:
            return "routable" + (f", although {chance}" if chance else "")
        if self.rows < MIN_ROWS:
            return "too few rows to decide"
        return "nothing to route on these prompts: " + (chance or "no signal is better than random")


class Operation(msgspec.Struct, frozen=True):
    """The effect of a threshold: the pair's quality relative to the large model's, and the share of requests that the
    device answers.
    """

    retained: Interval
    cloud: Interval


def evaluate_pair(rows: Rows, signals: Mapping[str, Array64], seed: int) -> list[TaskReport]:
    """Return the figures of all prompts together (first) and of each task.

    Args:
        signals: The result of `signals_of`.
    """
    tasks = np.array([row.task for row in rows.answers])
    names = list(dict.fromkeys(tasks.tolist()))
    parts = {"all prompts": np.arange(len(rows)), **{name: np.flatnonzero(tasks == name) for name in names}}
    if len(names) == 1:
        del parts[names[0]]
    return [_task_report(name, rows, signals, part, seed) for name, part in parts.items()]


def signals_of(rows: Rows, unseen: Unseen, tokens: int) -> dict[str, Array64]:
    """Return every signal that is compared, [rows] each, higher favours the device.

    Args:
        tokens: The number of tokens that the handoff waits for, in the last stage.
    """
    scores = [row.confidences[min(tokens, len(row.confidences)) - 1].score for row in rows.answers]
    return {
        BOTH: unseen.stages[-1],
        PROMPT: unseen.quality,
        RAW: np.array(scores),
        LENGTH: -rows.inputs[:, LENGTH_INPUT],
    }


def calibration_errors(rows: Rows, signals: Mapping[str, Array64]) -> dict[str, float]:
    """Return the expected calibration error of both signals, which are probabilities, over ten equal bins."""
    return {name: calibration_error(signals[name], rows.enough, rows.weights) for name in (PROMPT, BOTH)}


def choose_threshold(
    probabilities: Array64, small: Array64, large: Array64, target: Target, weights: Array64 | None = None
) -> float:
    """Return the probability below which a request goes to the large model.

    The lowest threshold that keeps the target's share of the large model's quality, or that sends at most the target's
    share of the requests.

    Args:
        probabilities: [rows], that the small model's answer is good enough.
        small, large: [rows], the quality of both answers.
        target: The owner's goal.
        weights: [rows], how much each row counts; default: all the same.
    """
    shares = np.ones(len(small)) if weights is None else weights
    order = np.argsort(-probabilities, kind="stable")
    # With the first n rows on the device:
    moved, gains = (np.concatenate([[0.0], np.cumsum(part[order])]) for part in (shares, shares * (small - large)))
    counts = np.arange(len(order) + 1)
    if target.cloud_share is not None:
        allowed = moved >= (1 - target.cloud_share) * moved[-1] - 1e-9
        most = int(counts[allowed].min())
    else:
        keep, whole = 1.0 if target.keep is None else target.keep, float(shares @ large)
        most = int(counts[whole + gains >= keep * whole - 1e-9].max())
    if most == 0:
        return 1.0
    if most == len(order):
        return 0.0
    return float(probabilities[order[most - 1]])


def kept_on_device(rows: Rows, unseen: Unseen, stage: int | None, target: Target) -> Kept:
    """Return the rows that the target's threshold leaves on the device. The threshold for each fold is chosen on the
    other folds.

    Args:
        stage: Index of the handoff's stage; None: by `edge.quality` alone.
    """
    kept = np.zeros(len(rows), bool)
    for held, fitted in unseen.folds:
        seen = rows[np.setdiff1d(np.arange(len(rows)), held)]
        known = fitted.quality_unseen if stage is None else fitted.stages_unseen[stage]
        predicted = unseen.quality if stage is None else unseen.stages[stage]
        kept[held] = predicted[held] >= choose_threshold(known, seen.small, seen.large, target, seen.weights)
    return kept


def operate(rows: Rows, kept: Kept, seed: int) -> Operation:
    """Return the quality and the share of the pair if the rows in `kept` [rows] are answered on the device."""
    weights, quality = rows.weights, np.where(kept, rows.small, rows.large)

    def retained(part: Indices) -> float:
        return float(weights[part] @ quality[part]) / max(float(weights[part] @ rows.large[part]), 1e-9)

    def cloud(part: Indices) -> float:
        return float(1 - np.average(kept[part], weights=weights[part]))

    whole, draws = np.arange(len(rows)), _resamples(np.arange(len(rows)), seed)
    return Operation(
        _interval(retained(whole), [retained(part) for part in draws]),
        _interval(cloud(whole), [cloud(part) for part in draws]),
    )


def _task_report(name: str, rows: Rows, signals: Mapping[str, Array64], part: Indices, seed: int) -> TaskReport:
    draws, weights = _resamples(part, seed), rows.weights
    recovered: dict[str, Interval | None] = {}
    for signal, values in signals.items():
        value, *drawn = (apgr(values[one], rows.small[one], rows.large[one], weights[one]) for one in (part, *draws))
        known = [one for one in drawn if one is not None]
        recovered[signal] = None if value is None or not known else _interval(value, known)
    chances = [rows.answers[index].chance for index in part]
    return TaskReport(
        name,
        len(part),
        float(np.average(rows.small[part], weights=weights[part])),
        float(np.average(rows.large[part], weights=weights[part])),
        float(np.average(chances, weights=weights[part])) if all(chances) else 0.0,
        recovered,
    )


def _resamples(part: Indices, seed: int) -> list[Indices]:
    draw = np.random.default_rng(seed)
    return [draw.choice(part, len(part)) for _ in range(BOOTSTRAPS)]


def _interval(value: float, drawn: Sequence[float]) -> Interval:
    low, high = np.quantile(drawn, [0.025, 0.975]).tolist()
    return Interval(value, low, high)


class FittedReport(msgspec.Struct, frozen=True):
    """The description of a fit in a report; the figures are separate."""

    target: Target
    prompt_below: float  # the threshold of `edge.quality` alone
    prompt_alone: Operation


class PairReport(msgspec.Struct, frozen=True):
    """The content of a report."""

    small: str  # the models' names
    large: str
    weighted: bool  # whether the tasks' proportions differ between the answers and the prompts
    tasks: Sequence[TaskReport]  # figures of all prompts together, then of each task
    errors: Mapping[str, float]  # calibration error by signal
    handoff: PairHandoff | None  # None if published signals name no handoff
    operation: Operation | None  # effect of the handoff
    fitted: FittedReport | None  # None if the signals were published before

    @property
    def nothing_to_route(self) -> bool:
        """Whether no signal is better than random routing on these prompts."""
        return not self.tasks[0].routable

    @property
    def by_kind_only(self) -> bool:
        """Whether the prompts are routable together, but none of the tasks alone."""
        return self.tasks[0].routable and len(self.tasks) > 1 and not any(task.routable for task in self.tasks[1:])


def markdown(report: PairReport) -> str:
    """Return the report as Markdown."""
    whole = report.tasks[0]
    source = (
        "Every figure comes from fits that did not see the prompt (cross-validation)"
        if report.fitted
        else "The signals were published before, and nothing is fitted on these prompts"
    )
    intro = (
        f"Both models answered {whole.rows} prompts. {source}. Brackets have 95 % bootstrap intervals. The columns "
        "after `large` have the APGR of each signal: the share of the large model's advantage that is kept, averaged "
        "over all shares of requests that are sent to the large model. Random routing has 0.50."
    )
    if report.weighted:
        intro += (
            " Not all prompts were answered. In the row of all prompts, each task counts by its share of all prompts."
        )
    lines = [
        f"# {report.small} and {report.large}",
        "",
        *textwrap.wrap(intro, _WIDTH),
        "",
        f"| prompts | n | small | large | {BOTH} | {PROMPT} | raw {RAW} | {LENGTH} | |",
        "|---|---|---|---|---|---|---|---|---|",
        *map(_task_line, report.tasks),
        "",
        f"The calibration error is {report.errors[PROMPT]:.3f} for {PROMPT} and {report.errors[BOTH]:.3f} for {BOTH}.",
        "",
        *([_BY_KIND, ""] if report.by_kind_only else []),
    ]
    if report.fitted is not None:
        lines += _advice(report, report.fitted)
    elif report.handoff is None:
        lines.append("The signals do not name a handoff.")
    else:
        lines += ["The handoff of these signals:", "", *_handoff_table(report)]
    return "\n".join(lines) + "\n"


def write_report(folder: Path, report: PairReport, rows: Rows, signals: Mapping[str, Array64]) -> None:
    """Write report.md, routing.svg and calibration.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text(markdown(report), encoding="utf-8")
    curves = routing_curves(signals, rows.small, rows.large, rows.weights)
    traffic = f"{report.small} and {report.large}, {len(rows)} prompts"
    (folder / "routing.svg").write_text(chart(curves, traffic), encoding="utf-8")
    (folder / "calibration.svg").write_text(reliability(signals[BOTH], rows.enough), encoding="utf-8")


def policy_lines(handoff: PairHandoff) -> str:
    """Return the route to paste into a policy that has the targets `small` and `large`."""
    below, within = f"{handoff.below:.3f}", f"{handoff.within_ms}ms"
    return (
        "routes:\n"
        "  - name: calibrated\n"
        "    use: [small, large]\n"
        f"    handoff: {{after_tokens: {handoff.after_tokens}, below: {below}, within: {within}}}"
    )


def _task_line(task: TaskReport) -> str:
    recovered = " | ".join(_printed(task.recovered[name]) for name in (BOTH, PROMPT, RAW, LENGTH))
    return f"| {task.name} | {task.rows} | {task.small:.1%} | {task.large:.1%} | {recovered} | {task.verdict} |"


def _printed(found: Interval | None) -> str:
    return "–" if found is None else f"{found.value:.3f} ({found.low:.2f} to {found.high:.2f})"


def _advice(report: PairReport, fitted: FittedReport) -> list[str]:
    if report.nothing_to_route:
        reason = report.tasks[0].verdict.split(": ")[-1]
        return [
            f"**Nothing to route on these prompts:** {reason}. No signal is published.",
            f"Send them to {report.large}, or keep them on the device for other reasons than quality.",
        ]
    assert report.handoff is not None
    wanted = (
        f"{fitted.target.cloud_share:.0%} of the requests in the cloud"
        if fitted.target.cloud_share is not None
        else f"{fitted.target.keep or 1.0:.0%} of the large model's quality"
    )
    return [
        f"The target is {wanted}. The results come from prompts that neither fit nor threshold used:",
        "",
        *_handoff_table(report),
        _operation_line(f"{PROMPT} alone", fitted.prompt_below, fitted.prompt_alone),
        "",
        "This is the route for the policy:",
        "",
        "```yaml",
        policy_lines(report.handoff),
        "```",
        "",
        f"A route to the device decides by the prompt alone with `when: edge.quality >= {fitted.prompt_below:.3f}`.",
    ]


def _handoff_table(report: PairReport) -> list[str]:
    assert report.handoff is not None
    assert report.operation is not None
    name = f"handoff after {report.handoff.after_tokens} tokens"
    return [
        "| decided by | threshold | quality kept | sent to the cloud |",
        "|---|---|---|---|",
        _operation_line(name, report.handoff.below, report.operation),
    ]


def _operation_line(name: str, below: float, operation: Operation) -> str:
    kept, cloud = (
        f"{one.value:.1%} ({one.low:.1%} to {one.high:.1%})" for one in (operation.retained, operation.cloud)
    )
    return f"| {name} | {below:.3f} | {kept} | {cloud} |"
