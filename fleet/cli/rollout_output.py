"""Plain-text output of the commands: counts, tables, changes of a bundle, and the rollouts of a fleet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TypeVar

from causeway_server.router.bundle.manifest import (
    WHOLE,
    Blob,
    BundleAdapter,
    BundleManifest,
    BundleModel,
    BundleProjector,
)
from causeway_server.router.bundle.protocol import LATENCY_BOUNDS_S

from ..operators.answers import FleetAnswer, RolloutDetail, RolloutStatus
from ..store.history import CohortFigures, Happened

T = TypeVar("T")
FACTORY = "factory's files"
_MEMBERS = {
    "commit": "run it",
    "trial": "try it",
    "waiting": "wait to change",
    "quarantine": "rolled it back",
    "silent": "are silent",
    "held": "are held",
    "pinned": "are pinned",
}
"""Words for the states of members; other states are intermediate steps and keep their names."""
_UNDONE = ("aborted", "reverting", "reverted")


def manifest_changes(old: BundleManifest | None, new: BundleManifest) -> list[str]:
    """Return the differences of a cohort's bundles, the policy's text apart. `old` None: the cohort is new."""
    if old is None:
        sizes = (("case file", new.cases), ("model", new.models), ("setting", new.settings))
        return [f"first bundle: policy, {', '.join(counted(len(of), kind) for kind, of in sizes)}"]
    return [*_changes(old, new)]


def _changes(old: BundleManifest, new: BundleManifest) -> Iterator[str]:
    both = (old, new)
    models = [{model.name: model for model in one.models} for one in both]
    adapters = [{f"{model.name}+{it.name}": it for model in one.models for it in model.adapters} for one in both]
    projectors = [{model.name: model.projector for model in one.models} for one in both]
    signals = [{f"{it.kind} of {model.name}": it for model in one.models for it in model.signals} for one in both]
    if old.policy != new.policy:
        yield "policy changed"
    if old.cases != new.cases:
        yield f"cases changed: {counted(len(old.cases), 'file')}, now {len(new.cases)}"
    yield from _weights("model", *models)
    yield from _weights("adapter", *adapters)
    for name, before, after in _differing(*projectors):
        yield f"projector of {name}: {_projector_change(before, after)}"
    for name, _, _ in _differing(*signals):
        change = "removed" if name not in signals[1] else "changed" if name in signals[0] else "added"
        yield f"signal {name}: {change}"
    for key, value, now in _differing(old.settings, new.settings):
        yield f"settings.{key}: {'unset' if value is None else value} -> {'unset' if now is None else now}"
    for key in ("leaving", "min_daemon"):
        if getattr(old, key) != getattr(new, key):
            yield f"{key}: {getattr(old, key)} -> {getattr(new, key)}"


def _differing(old: Mapping[str, T], new: Mapping[str, T]) -> Iterator[tuple[str, T | None, T | None]]:
    """Yield each name whose values differ, with the old and the new value; None for a missing value."""
    for name in sorted({*old, *new}):
        if (before := old.get(name)) != (after := new.get(name)):
            yield name, before, after


def _weights(
    kind: str, old: Mapping[str, BundleModel | BundleAdapter], new: Mapping[str, BundleModel | BundleAdapter]
) -> Iterator[str]:
    for name, before, after in _differing(old, new):
        if after is None:
            yield f"{kind} {name}: removed"
        elif before is None:
            yield f"{kind} {name}: added, {_size(after.blob)}"
        elif before.blob != after.blob:
            yield f"{kind} {name}: other weights, {_size(before.blob)} -> {_size(after.blob)}"
        elif (scale := getattr(before, "scale", 1.0)) != (now := getattr(after, "scale", 1.0)):
            yield f"{kind} {name}: scale {scale:g} -> {now:g}"
        elif before.golden != after.golden:
            yield f"{kind} {name}: other golden prompts"


def _projector_change(before: BundleProjector | None, after: BundleProjector | None) -> str:
    if after is None:
        return "removed"
    if before is None:
        return f"added, {_size(after.blob)}"
    if before.blob != after.blob:
        return f"other weights, {_size(before.blob)} -> {_size(after.blob)}"
    return "for other weights of the model"


def _size(*blobs: Blob) -> str:
    return f"{sum(blob.size_bytes for blob in blobs) / 1e6:.1f} MB"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 rollout`, `2 rollouts`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def time_text(at: float) -> str:
    """Return a time in UTC; `at`: Unix seconds."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S}Z"


def bundle_name(bundle: str | None) -> str:
    """Return the first digits of a bundle's id, as the console shows it; None or "": the factory's files."""
    return bundle[:12] if bundle else FACTORY


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table: a head in capitals, columns as wide as their cells; none without rows."""
    if not rows:
        return
    lines = [[name.upper() for name in head], *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()


def overview(fleet: FleetAnswer, rollouts: Sequence[RolloutStatus]) -> Iterator[str]:
    cohorts = [(one.name, str(one.devices), str(one.recently_seen), _running(one.running)) for one in fleet.cohorts]
    yield from table(("cohort", "devices", "seen in 15 min", "running"), cohorts)
    used = [one for one in fleet.cohorts if one.figures.requests]
    if used:
        yield ""
    head = ("cohort", "requests", "on device", "usd per 1000", "p95", "hottest", "drift", "records")
    yield from table(head, [(one.name, *_figures(one.figures)) for one in used])
    for one in fleet.cohorts:
        if one.ahead:
            yield (
                f"{one.name}: {one.ahead} devices have newer metadata than the control plane. Was it "
                "restored from a backup?"
            )
    if rollouts:
        yield ""
    rows = [
        (one.id, one.cohort, bundle_name(one.to_bundle), state_text(one), percent(one.share), one.reason)
        for one in rollouts
    ]
    yield from table(("rollout", "cohort", "bundle", "state", "share", "why"), rows)


def _compared(one: Happened) -> str:
    """Return a prediction beside what happened."""
    names = {"on_device": "on the device", "quality": "good answers", "usd": "USD per 1,000 requests"}
    low, high, value = (
        "" if figure is None else f"{figure:.4g}" if one.name == "usd" else f"{figure:.1%}"
        for figure in (one.low, one.high, one.value)
    )
    if one.value is None:
        seen = ""
    else:
        seen = f", happened {value}" + ("" if one.low <= one.value <= one.high else ": not as predicted")
    return f"{names.get(one.name, one.name)}: predicted {low} to {high}{seen}"


def _figures(figures: CohortFigures) -> Iterator[str]:
    yield str(figures.requests)
    yield "-" if figures.on_device is None else f"{figures.on_device:.1%}"
    yield "-" if figures.usd is None else f"{figures.usd:.4g}"
    yield f"> {LATENCY_BOUNDS_S[-1]:g} s" if figures.p95_s is None else f"< {figures.p95_s:g} s"
    yield "-" if figures.hottest_c is None else f"{figures.hottest_c:.0f} °C"
    yield "-" if figures.drift is None else f"{figures.drift:.2f}"
    yield f"{figures.records} of {counted(figures.recorded_devices, 'device')}"


def _running(devices: Mapping[str, int]) -> str:
    most_first = sorted(devices.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{bundle_name(bundle)} on {count}" for bundle, count in most_first)


def rollout_line(rollout: RolloutStatus) -> str:
    reason = f": {rollout.reason}" if rollout.reason else ""
    where = f"{bundle_name(rollout.to_bundle)} {state_text(rollout)}, {percent(rollout.share)}"
    return f"{rollout.id} {rollout.cohort} {where}{reason}"


def state_text(rollout: RolloutStatus) -> str:
    """Return the state, with the current or paused check or stage; the soak follows the last stage."""
    stages = len(rollout.stages)
    where = f"stage {rollout.stage + 1} of {stages}" if rollout.stage < stages else "soak"
    if rollout.state == "paused":
        return f"{where if rollout.began else 'replay'} paused"
    return where if rollout.state == "stage" else rollout.state


def notes(rollout: RolloutStatus) -> Iterator[str]:
    """Yield explanations of this state for people."""
    if rollout.state in _UNDONE and rollout.from_bundle is None:
        yield "note: the cohort has no earlier bundle; devices that run this one keep it until a rollout of another"
    planned = rollout.stages[min(rollout.stage, len(rollout.stages) - 1)]
    if rollout.share > planned:
        yield (
            f"note: {percent(planned)} contains no device that was seen lately, so the share was raised "
            "to the first device"
        )


def detail_lines(rollout: RolloutDetail) -> Iterator[str]:
    """Yield the lines about a rollout: its devices, its last look, and its history."""
    yield rollout_line(rollout)
    yield from (f"  {note}" for note in (*notes(rollout), *rollout.notes))
    yield from (f"  {_compared(one)}" for one in rollout.predictions)
    members = [f"{devices} {_MEMBERS.get(state, state)}" for state, devices in sorted(rollout.members.items())]
    yield f"  devices in the share: {', '.join(members) or 'none'}"
    for look in rollout.looks[-1:]:
        yield f"  look {len(rollout.looks)}: {look.outcome}"
        yield from (f"    {metric.outcome:<12}  {metric.reason}" for metric in look.metrics)
    for event in rollout.events:
        yield f"  {time_text(event.at)} {event.actor} {event.action} {event.reason}".rstrip()


def percent(share: int) -> str:
    return f"{share * 100 / WHOLE:g} %"
