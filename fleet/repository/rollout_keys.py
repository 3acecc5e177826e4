"""The keys `cohorts.NAME.rollout` of `fleet.yaml`, and their conversion to the settings of `fleet.rollout`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from router.bundle.rollout import WHOLE
from router.documents.quantities import seconds_of

from ..rollout.boxes import MaintenanceWindow
from ..rollout.settings import METRICS, MetricLimit, RolloutSettings, RolloutStage

Weekday = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
WEEKDAYS: tuple[Weekday, ...] = get_args(Weekday)

_LONGEST_PAUSE_S = 360.0  # a parked poll of at most 300 s, after which a box reports; a lost one is renewed within 60 s

Percent = Annotated[float, Meta(gt=0, le=100, title="a share in percent, above 0 and at most 100")]
Span = Annotated[str, Meta(pattern=r"^\d+(\.\d+)?(ms|s|m|h|d)$", title="a time such as 30s, 20m or 1d")]
Clock = Annotated[str, Meta(pattern="^([01][0-9]|2[0-3]):[0-5][0-9]$", title='a time of day such as "22:30"')]


class WindowDoc(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A time of the week in which boxes may change, in each box's own local time."""

    opens: Clock  # start of the window, in the local time of each box
    closes: Clock  # end of the window; if not after `opens`, on the next day
    days: Annotated[tuple[Weekday, ...], Meta(min_length=1)] = WEEKDAYS  # days on which the window opens


class RolloutDoc(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of a cohort's rollouts."""

    stages: Annotated[tuple[Percent, ...], Meta(min_length=1)] = (
        1.0,
        5.0,
        25.0,
        50.0,
        100.0,
    )  # percent of the cohort's boxes
    approval: tuple[Percent, ...] = ()  # shares of stages that wait for an approver
    least: Span = "20m"  # least duration of a stage
    most: Span = "1d"  # maximum duration; a stage without a verdict by then is paused
    soak: Span = "1h"  # observation after the last stage
    first_look: Span = "150s"  # time of the first look; each later one is at twice the time of the one before
    silence: Span = "15m"  # a box that reported before and is then silent for this long has failed
    metrics: dict[
        Literal["errors", "degraded", "latency"], Percent
    ] = {}  # margins in percentage points; none: 2, 5 and 5
    windows: tuple[WindowDoc, ...] = ()  # maintenance windows; none: boxes may change at any time
    per_site: Annotated[int, Meta(ge=1)] = 1  # the most boxes of a site that change at once


def rollout_settings(doc: RolloutDoc) -> RolloutSettings:
    """Return the settings of a cohort's rollouts.

    Raises:
        ValueError: The keys contradict each other; `rollout_problems` names them.
    """
    problem = next(rollout_problems(doc), None)
    if problem is not None:
        raise ValueError(f"{problem[0]}: {problem[1]}")
    stages = tuple(
        RolloutStage(round(share * WHOLE / 100), _seconds(doc.least), _seconds(doc.most), share in doc.approval)
        for share in doc.stages
    )
    metrics = tuple(MetricLimit(name, margin / 100) for name, margin in doc.metrics.items()) or METRICS
    return RolloutSettings(
        stages,
        metrics,
        soak_s=_seconds(doc.soak),
        first_look_s=_seconds(doc.first_look),
        silence_s=_seconds(doc.silence),
    )


def maintenance_windows(doc: RolloutDoc) -> tuple[MaintenanceWindow, ...]:
    """Return the windows in which boxes may change; none: always."""
    return tuple(
        MaintenanceWindow(
            frozenset(WEEKDAYS.index(day) + 1 for day in window.days), _minute(window.opens), _minute(window.closes)
        )
        for window in doc.windows
    )


def rollout_problems(doc: RolloutDoc) -> Iterator[tuple[str, str]]:
    """Yield (key, message) of keys that contradict each other."""
    stages = doc.stages
    if list(stages) != sorted(set(stages)) or stages[-1] != 100:
        yield "stages", "stages must grow and end with 100"
    if round(min(stages) * WHOLE / 100) < 1:
        yield "stages", f"the smallest share is {100 / WHOLE:g} percent"
    strange = [share for share in doc.approval if share not in stages]
    if strange:
        yield "approval", f"{strange[0]:g} is not one of the stages {', '.join(f'{share:g}' for share in stages)}"
    if stages[0] in doc.approval:
        yield (
            "approval",
            f"{stages[0]:g} is the first stage, which begins when the rollout is applied: name a later one",
        )
    for key in ("least", "most", "soak", "first_look", "silence"):
        if _seconds(getattr(doc, key)) <= 0:
            yield key, "must be above 0"
    if _seconds(doc.least) > _seconds(doc.most):
        yield "most", f"a stage takes at least {doc.least} and at most {doc.most}: `most` must not be the shorter one"
    if _seconds(doc.least) <= _seconds(doc.silence):
        yield (
            "least",
            f"must be longer than silence ({doc.silence}): only then does a stage notice boxes that went silent",
        )
    if any(margin >= 100 for margin in doc.metrics.values()):
        yield "metrics", "a margin must be below 100 percentage points"


def is_hasty(doc: RolloutDoc) -> bool:
    """Whether `silence` is shorter than the pauses between the reports of a healthy box."""
    return 0 < _seconds(doc.silence) < _LONGEST_PAUSE_S


def _seconds(span: str) -> float:
    seconds = seconds_of(span)
    assert seconds is not None  # the pattern of Span
    return seconds


def _minute(clock: str) -> int:
    hours, minutes = clock.split(":")
    return 60 * int(hours) + int(minutes)
