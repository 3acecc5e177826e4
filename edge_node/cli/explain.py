"""The box's own explanation (`POST /v1/route`) for people: which rules were tried, which held, what was absent."""

from __future__ import annotations

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from router.types import AttemptPlan, CachePlan, Decision, Estimates, Reason, ReasonCode, Snapshot


class Explained(msgspec.Struct, frozen=True):
    """What `/v1/route` returns."""

    cache: CachePlan
    decision: Decision
    estimates: Estimates
    snapshot: Snapshot
    cached_age_s: float | None = None


# mark, style, words; `{detail}` and `{target}` are the reason's own.
_WORDS: dict[ReasonCode, tuple[str, str, str]] = {
    "rule_held": ("✓", "green", "held"),
    "rule_not_held": ("·", "dim", "did not hold"),
    "signal_absent": ("?", "yellow", "{detail} cannot be read on this box, so it does not hold"),
    "rule_failed": ("!", "red", "could not be evaluated: {detail}"),
    "constraint_held": ("✓", "green", "constraint holds {detail}"),
    "constraint_excluded": ("✗", "red", "constraint cut {target} {detail}"),
    "preference_excluded": ("✗", "red", "the caller's wish cut {target} {detail}"),
    "preference_ordered": ("↑", "yellow", "the caller's wish moved {target} forward {detail}"),
    "model_named": ("✓", "green", "the caller named {target} {detail}"),
    "continued": ("✓", "green", "the rest of an answer of {target} {detail}"),
    "target_unable": ("✗", "red", "{target} cannot do this: {detail}"),
    "target_down": ("↓", "yellow", "{target} is down, tried last {detail}"),
    "no_route": ("✗", "red", "no target is left {detail}"),
    "cache_rule_held": ("✓", "green", "cache rule held"),
    "cache_rule_not_held": ("·", "dim", "cache rule did not hold"),
    "cache_refused": ("✗", "yellow", "not cached: {detail}"),
}


def render(explained: Explained) -> RenderableType:
    decision = explained.decision
    name = decision.rule or ("a model was named" if decision.attempts else "no route")
    head = Text.assemble((name, "bold"), f"  {decision.policy}@{decision.revision}")
    if decision.on_device:
        head.append("  bound to the device", style="yellow")
    # What binds a request binds its cache too: the constraints were told once already.
    cache = [reason for reason in explained.cache.reasons if not reason.code.startswith("constraint")]
    return Group(
        head,
        _attempts(decision.attempts),
        Text(),
        _reasons([*decision.reasons, *(reason for reason in cache if reason not in decision.reasons)]),
        Text(),
        Text(f"cache    {_cache(explained)}"),
        _signals(explained),
    )


def _attempts(attempts: tuple[AttemptPlan, ...]) -> RenderableType:
    if not attempts:
        return Text("  nothing would be tried: the answer is 503 with these reasons", style="red")
    table = Table.grid(padding=(0, 2))
    for number, plan in enumerate(attempts, start=1):
        handoff = plan.handoff
        note = f"hands off when under {handoff.below:g} after {handoff.after_tokens} tokens" if handoff else ""
        target = plan.target
        cells = (f"  {number}.", target.name, target.at, target.model)
        table.add_row(*map(Text, cells), Text(note, style="dim"))
    return table


def _reasons(reasons: list[Reason]) -> Table:
    table = Table.grid(padding=(0, 2))
    for reason in reasons:
        mark, style, words = _WORDS[reason.code]
        said = words.format(detail=reason.detail, target=reason.target or "the target").strip()
        table.add_row(Text(f"  {mark}", style=style), Text(reason.rule), Text(said, style=style))
    return table


def _cache(explained: Explained) -> str:
    if explained.cached_age_s is not None:
        return f"has an answer, {explained.cached_age_s:.1f} s old"
    exact = explained.cache.exact
    return f"has none; this one would be kept for {exact.ttl_s:g} s" if exact else "is not used for this request"


def _signals(explained: Explained) -> Table:
    """Every signal that has a value, under the name by which a policy calls it."""
    snapshot, estimates = explained.snapshot, explained.estimates
    groups = {
        "request": {"prompt_tokens": estimates.prompt_tokens},
        "device": msgspec.structs.asdict(snapshot.device),
        "edge": {**msgspec.structs.asdict(snapshot.edge), "quality": estimates.quality},
        "cloud": msgspec.structs.asdict(snapshot.cloud),
        "spend": msgspec.structs.asdict(snapshot.spend),
    }
    table = Table.grid(padding=(0, 2))
    for group, signals in groups.items():
        known = [f"{name} {_plain(value)}" for name, value in signals.items() if value is not None]
        if known:
            table.add_row(Text(f"{group:7}"), Text(", ".join(known)))
    return table


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)
