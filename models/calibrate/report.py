"""The report of a calibrated pair: figures and the policy line as Markdown, curves as SVG."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from ..signals.pair import ModelIdentity, PairHandoff
from .evaluate import BOTH, LENGTH, PROMPT, RAW, Interval, Operation, Target, TaskReport
from .fit import Rows
from .routing_curves import Array64, picture, routing_curves

_BY_KIND = "No task is routable by itself: the signals tell kinds of prompts apart, and no more."
_SIDE, _MARGIN, _BINS = 320, 40, 10
_WIDTH = 120  # of a line of prose


class FittedReport(msgspec.Struct, frozen=True):
    """What a report says of a fit beside its figures."""

    target: Target
    prompt_below: float  # the threshold of `edge.quality` alone
    prompt_alone: Operation


class PairReport(msgspec.Struct, frozen=True):
    """Everything that a report says."""

    small: ModelIdentity
    large: ModelIdentity
    weighted: bool  # the tasks have other proportions among the answers than among the prompts
    tasks: Sequence[TaskReport]  # all prompts together first
    errors: Mapping[str, float]  # calibration error by signal
    handoff: PairHandoff | None  # None: published signals name none
    operation: Operation | None  # of the handoff
    fitted: FittedReport | None  # None: the signals were published before

    @property
    def nothing_to_route(self) -> bool:
        """Whether no signal is better than random on these prompts."""
        return not self.tasks[0].routable

    @property
    def by_kind_only(self) -> bool:
        """Whether the prompts are routable, but none of their tasks by itself."""
        return self.tasks[0].routable and len(self.tasks) > 1 and not any(task.routable for task in self.tasks[1:])


def markdown(report: PairReport) -> str:
    """Return the report."""
    whole = report.tasks[0]
    source = (
        "Every figure is from fits that did not see the prompt (cross-validation)"
        if report.fitted
        else "The signals were published before, and nothing is fitted on these prompts"
    )
    intro = (
        f"{whole.rows} prompts, answered by both. {source}; brackets are 95 % bootstrap intervals. APGR: share of the "
        "large model's advantage that is kept, averaged over all shares of requests sent to it; random routing has "
        "0.50."
    )
    if report.weighted:
        intro += " Not all prompts are answered: where tasks count together each has its share of all prompts."
    lines = [
        f"# {report.small.name} and {report.large.name}",
        "",
        *textwrap.wrap(intro, _WIDTH),
        "",
        f"| prompts | n | small | large | {BOTH} | {PROMPT} | raw {RAW} | {LENGTH} | |",
        "|---|---|---|---|---|---|---|---|---|",
        *map(_task_line, report.tasks),
        "",
        f"Calibration error: {PROMPT} {report.errors[PROMPT]:.3f}, {BOTH} {report.errors[BOTH]:.3f}.",
        "",
        *([_BY_KIND, ""] if report.by_kind_only else []),
        *(_published(report) if report.fitted is None else _advice(report, report.fitted)),
    ]
    return "\n".join(lines) + "\n"


def write_report(folder: Path, report: PairReport, rows: Rows, signals: Mapping[str, Array64]) -> None:
    """Write report.md, routing.svg and calibration.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text(markdown(report), encoding="utf-8")
    curves = routing_curves(signals, rows.small, rows.large, rows.weights)
    traffic = f"{report.small.name} and {report.large.name}, {len(rows)} prompts"
    (folder / "routing.svg").write_text(picture(curves, traffic), encoding="utf-8")
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


def reliability(probabilities: Array64, truth: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> str:
    """Return an SVG plot of ten bins: the stated probability to the right, the observed frequency upwards."""
    bins = np.minimum((probabilities * _BINS).astype(int), _BINS - 1)
    dots = []
    for number in range(_BINS):
        inside = bins == number
        if not inside.any():
            continue
        x, y = _point(float(probabilities[inside].mean()), float(truth[inside].mean()))
        radius = 2 + 12 * float(inside.mean()) ** 0.5
        dots.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="#1b7837" fill-opacity="0.7"/>')
    (left, bottom), (right, top) = _point(0, 0), _point(1, 1)
    size = _SIDE + 2 * _MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size} {size}" font-family="sans-serif">',
            "<style>text {font-size: 11px}</style>",
            f'<rect width="{size}" height="{size}" fill="white"/>',
            f'<text x="{left}" y="24">Good enough: observed, by stated probability (area: number of prompts)</text>',
            f'<line x1="{left}" y1="{bottom}" x2="{right}" y2="{top}" stroke="#bdbdbd"/>',
            *(_tick(step / 5) for step in range(6)),
            *dots,
            "</svg>\n",
        ]
    )


def _task_line(task: TaskReport) -> str:
    recovered = " | ".join(_interval(task.recovered[name]) for name in (BOTH, PROMPT, RAW, LENGTH))
    return f"| {task.name} | {task.rows} | {task.small:.1%} | {task.large:.1%} | {recovered} | {task.verdict} |"


def _interval(found: Interval | None) -> str:
    return "–" if found is None else f"{found.value:.3f} ({found.low:.2f} to {found.high:.2f})"


def _advice(report: PairReport, fitted: FittedReport) -> list[str]:
    if report.nothing_to_route:
        reason = report.tasks[0].verdict.split(": ")[-1]
        return [
            f"**Nothing to route on these prompts:** {reason}. No signal is published.",
            f"Send them to {report.large.name}, or keep them on the device for other reasons than quality.",
        ]
    assert report.handoff is not None
    wanted = (
        f"{fitted.target.cloud_share:.0%} of the requests in the cloud"
        if fitted.target.cloud_share is not None
        else f"{fitted.target.keep or 1.0:.0%} of the large model's quality"
    )
    return [
        f"Target: {wanted}. On prompts that neither fit nor threshold saw:",
        "",
        *_handoff_table(report),
        _operation_line(f"{PROMPT} alone", fitted.prompt_below, fitted.prompt_alone),
        "",
        "The line for the policy:",
        "",
        "```yaml",
        policy_lines(report.handoff),
        "```",
        "",
        f"By the prompt alone: `when: edge.quality >= {fitted.prompt_below:.3f}` on a route to the device.",
    ]


def _published(report: PairReport) -> list[str]:
    if report.handoff is None:
        return ["The signals name no handoff."]
    return ["The handoff that belongs to the signals:", "", *_handoff_table(report)]


def _handoff_table(report: PairReport) -> list[str]:
    assert report.handoff is not None
    assert report.operation is not None
    name = f"handoff after {report.handoff.after_tokens} tokens"
    return [
        "| decided by | threshold | quality kept | in the cloud |",
        "|---|---|---|---|",
        _operation_line(name, report.handoff.below, report.operation),
    ]


def _operation_line(name: str, below: float, operation: Operation) -> str:
    kept, cloud = (
        f"{one.value:.1%} ({one.low:.1%} to {one.high:.1%})" for one in (operation.retained, operation.cloud)
    )
    return f"| {name} | {below:.3f} | {kept} | {cloud} |"


def _point(right: float, up: float) -> tuple[float, float]:
    return _MARGIN + right * _SIDE, _MARGIN + (1 - up) * _SIDE


def _tick(share: float) -> str:
    (x, bottom), (left, y) = _point(share, 0), _point(0, share)
    return (
        f'<text x="{x:.0f}" y="{bottom + 15:.0f}" text-anchor="middle">{share:.0%}</text>'
        f'<text x="{left - 5:.0f}" y="{y + 4:.0f}" text-anchor="end">{share:.0%}</text>'
    )
