"""Render the response of `POST /v1/route`: which rules were evaluated, which held, which signals were absent."""

from __future__ import annotations

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from router.types import CachePlan, Decision, Estimates, Reason, ReasonCode, Snapshot


class RouteExplanation(msgspec.Struct, frozen=True):
    """The response of `/v1/route`."""

    cache: CachePlan
    decision: Decision
    estimates: Estimates
    snapshot: Snapshot
    cached_age_s: float | None = None


# Mark, style and text of each reason; `{detail}` and `{target}` are fields of the reason.
_REASON_TEXTS: dict[ReasonCode, tuple[str, str, str]] = {
    "rule_held": ("✓", "green", "held"),
    "rule_not_held": ("·", "dim", "did not hold"),
    "signal_absent": ("?", "yellow", "{detail} cannot be read on this box, so it does not hold"),
    "rule_failed": ("!", "red", "evaluation failed: {detail}"),
    "constraint_held": ("✓", "green", "constraint holds {detail}"),
    "constraint_excluded": ("✗", "red", "constraint excluded {target} {detail}"),
    "preference_excluded": ("✗", "red", "the request's preference excluded {target} {detail}"),
    "preference_ordered": ("↑", "yellow", "the request's preference moved {target} forward {detail}"),
    "model_named": ("✓", "green", "the request names {target} {detail}"),
    "continued": ("✓", "green", "continues an answer of {target} {detail}"),
    "target_unable": ("✗", "red", "{target} lacks a capability: {detail}"),
    "target_absent": ("✗", "red", "{target} is not on this box: {detail}"),
    "target_down": ("↓", "yellow", "{target} is down, tried last {detail}"),
    "no_route": ("✗", "red", "no target is left {detail}"),
    "cache_rule_held": ("✓", "green", "cache rule held"),
    "cache_rule_not_held": ("·", "dim", "cache rule did not hold"),
    "cache_refused": ("✗", "yellow", "not cached: {detail}"),
}


def render(explanation: RouteExplanation) -> RenderableType:
    """Return the explanation for a terminal."""
    decision = explanation.decision
    name = decision.rule or ("the request names a model" if decision.attempts else "no route")
    head = Text.assemble((name, "bold"), f"  {decision.policy}@{decision.revision}")
    if decision.on_device:
        head.append("  bound to the device", style="yellow")
    # The cache plan repeats the decision's constraints; show them once.
    cache = [reason for reason in explanation.cache.reasons if not reason.code.startswith("constraint")]
    return Group(
        head,
        _attempts(decision),
        Text(),
        _reasons([*decision.reasons, *(reason for reason in cache if reason not in decision.reasons)]),
        Text(),
        Text(f"cache    {_cache(explanation)}"),
        _signals(explanation),
    )


def _attempts(decision: Decision) -> RenderableType:
    attempts = decision.attempts
    if not attempts:
        status = 400 if decision.missing_abilities else 503
        return Text(f"  no attempt is left: the response is {status} with these reasons", style="red")
    table = Table.grid(padding=(0, 2))
    for number, plan in enumerate(attempts, start=1):
        handoff = plan.handoff
        note = (
            f"handoff if confidence is below {handoff.below:g} after {handoff.after_tokens} tokens" if handoff else ""
        )
        target = plan.target
        cells = (f"  {number}.", target.name, target.at, target.model)
        table.add_row(*map(Text, cells), Text(note, style="dim"))
    return table


def _reasons(reasons: list[Reason]) -> Table:
    table = Table.grid(padding=(0, 2))
    for reason in reasons:
        mark, style, template = _REASON_TEXTS[reason.code]
        text = template.format(detail=reason.detail, target=reason.target or "the target").strip()
        table.add_row(Text(f"  {mark}", style=style), Text(reason.rule), Text(text, style=style))
    return table


def _cache(explanation: RouteExplanation) -> str:
    if explanation.cached_age_s is not None:
        return f"hit: an answer {explanation.cached_age_s:.1f} s old"
    exact = explanation.cache.exact
    if exact is None:
        return f"bypass: {explanation.cache.bypass}"
    return f"miss; the answer would be fresh for {exact.ttl_s:g} s"


def _signals(explanation: RouteExplanation) -> Table:
    """Lay out every signal that has a value, under its name in policies."""
    snapshot, estimates = explanation.snapshot, explanation.estimates
    groups = {
        "request": {"prompt_tokens": estimates.prompt_tokens},
        "device": msgspec.structs.asdict(snapshot.device),
        "edge": {**msgspec.structs.asdict(snapshot.edge), "quality": estimates.quality},
        "cloud": msgspec.structs.asdict(snapshot.cloud),
        "spend": msgspec.structs.asdict(snapshot.spend),
    }
    table = Table.grid(padding=(0, 2))
    for group, signals in groups.items():
        present = [f"{name} {_format(value)}" for name, value in signals.items() if value not in (None, ())]
        if present:
            table.add_row(Text(f"{group:7}"), Text(", ".join(present)))
    return table


def _format(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)
