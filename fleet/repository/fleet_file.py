"""The grammar of `fleet.yaml`: the cohorts of a fleet, and the policies, models and settings of their devices.

The structs define the keys. The keys `cohorts.NAME.rollout` become the settings of `fleet.rollout`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from causeway_server.router.bundle.manifest import WHOLE, AdapterName, Leaving, Name, Release, Sha256, SignalKind
from causeway_server.router.bundle.settings import SettingValue
from causeway_server.router.described import described
from causeway_server.router.numbers import seconds_of

from ..rollout.settings import METRICS, MaintenanceWindow, MetricLimit, RolloutSettings, RolloutStage

Weekday = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
WEEKDAYS: tuple[Weekday, ...] = get_args(Weekday)

_MAX_PAUSE_S = 360.0  # a parked poll of 300 s, after which a device reports; a lost one is renewed within 60 s

Percent = Annotated[float, Meta(gt=0, le=100, title="a share in percent, above 0 and at most 100")]
Span = Annotated[str, Meta(pattern=r"^\d+(\.\d+)?(ms|s|m|h|d)$", title="a time such as 30s, 20m or 1d")]
Clock = Annotated[str, Meta(pattern="^([01][0-9]|2[0-3]):[0-5][0-9]$", title='a time of day such as "22:30"')]
FLEET_FILE = "fleet.yaml"
Label = Annotated[
    str, Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._/-]{0,62}$", title="a label of 1 to 63 letters, digits or . / _ -")
]


class WindowDoc(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A time of the week in which devices may change, in each device's own local time."""

    opens: Clock
    closes: Clock
    days: Annotated[tuple[Weekday, ...], Meta(min_length=1)] = WEEKDAYS


class RolloutDoc(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of a cohort's rollouts."""

    stages: Annotated[tuple[Percent, ...], Meta(min_length=1)] = (1.0, 5.0, 25.0, 50.0, 100.0)
    approval: tuple[Percent, ...] = ()
    least: Span = "20m"
    most: Span = "1d"
    soak: Span = "1h"
    first_look: Span = "150s"
    silence: Span = "15m"
    metrics: dict[Literal["errors", "degraded", "latency"], Percent] = {}
    windows: tuple[WindowDoc, ...] = ()
    per_site: Annotated[int, Meta(ge=1)] = 1


class ReplayDoc(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The records of the cohort's devices, over which a new policy is replayed."""

    records: Annotated[int, Meta(ge=1, le=10_000)] = 1
    records_per_day: Annotated[int, Meta(ge=0, le=1_000_000)] = 5000


def rollout_settings(doc: RolloutDoc) -> RolloutSettings:
    """Return the settings of a cohort's rollouts. Raises ValueError for `rollout_problems`."""
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
    """Return the windows in which devices may change; empty if they always may."""
    return tuple(
        MaintenanceWindow(
            frozenset(WEEKDAYS.index(day) + 1 for day in window.days), _minute(window.opens), _minute(window.closes)
        )
        for window in doc.windows
    )


def rollout_problems(doc: RolloutDoc) -> Iterator[tuple[str, str]]:
    """Yield (key, message) for keys that contradict each other."""
    stages = doc.stages
    if list(stages) != sorted(set(stages)) or stages[-1] != 100:
        yield "stages", "stages must grow and end with 100"
    if round(min(stages) * WHOLE / 100) < 1:
        yield "stages", f"the smallest share is {100 / WHOLE:g} percent"
    strange = [share for share in doc.approval if share not in stages]
    if strange:
        yield "approval", f"{strange[0]:g} is not one of the stages {', '.join(f'{share:g}' for share in stages)}"
    if stages[0] in doc.approval:
        first = f"{stages[0]:g} is the first stage, which begins when the rollout is applied"
        yield "approval", f"{first}: name a later one"
    for key in ("least", "most", "soak", "first_look", "silence"):
        if _seconds(getattr(doc, key)) <= 0:
            yield key, "must be above 0"
    if _seconds(doc.least) > _seconds(doc.most):
        yield (
            "most",
            f"a stage takes at least {doc.least} and at most {doc.most}, so `most` must not be shorter than `least`",
        )
    if _seconds(doc.least) <= _seconds(doc.silence):
        reason = "a stage notices silent devices only after that time"
        yield "least", f"must be longer than silence ({doc.silence}): {reason}"
    if any(margin >= 100 for margin in doc.metrics.values()):
        yield "metrics", "a margin must be below 100 percentage points"


def is_hasty(doc: RolloutDoc) -> bool:
    """Return whether `silence` is shorter than the usual time between two reports of a healthy device."""
    return 0 < _seconds(doc.silence) < _MAX_PAUSE_S


def _seconds(span: str) -> float:
    seconds = seconds_of(span)
    assert seconds is not None  # guaranteed by the pattern of Span
    return seconds


def _minute(clock: str) -> int:
    hours, minutes = clock.split(":")
    return 60 * int(hours) + int(minutes)


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The base of all parts of the file. Unknown keys are refused."""


class GoldenDoc(_Part, frozen=True):
    """A golden prompt: the model must answer it with exactly this text on the device."""

    prompt: str
    answer: str
    image: str | None = None


class WeightsFile(_Part, frozen=True):
    """Weights, given by a file in the fleet's folder or, for a file uploaded earlier, by hash and size."""

    file: str | None = None
    sha256: Annotated[Sha256, Meta(title="a sha256 in hex")] | None = None
    size_bytes: Annotated[int, Meta(ge=1)] | None = None


class _WeightsDoc(WeightsFile, frozen=True):
    golden: tuple[GoldenDoc, ...] = ()


class AdapterDoc(_WeightsDoc, frozen=True):
    """A LoRA adapter of a model, a GGUF file. Requests name it as MODEL+ADAPTER."""

    scale: float = 1.0


class ProjectorDoc(WeightsFile, frozen=True):
    """The mmproj file of a vision model."""

    model_sha256: Annotated[Sha256, Meta(title="a sha256 in hex")] | None = None


class SignalDoc(WeightsFile, frozen=True):
    """A learned signal about the model's answers, in a file written by `causeway-models`."""

    model_sha256: Annotated[Sha256, Meta(title="a sha256 in hex")] | None = None


class ModelDoc(_WeightsDoc, frozen=True):
    """A model, its adapters, its projector and the signals about its answers."""

    adapters: dict[Annotated[AdapterName, Meta(title="a name of a-z, 0-9, '.', '_', '-'")], AdapterDoc] = {}
    projector: ProjectorDoc | None = None
    signals: dict[SignalKind, SignalDoc] = {}
    uncalibrated: bool = False

    @property
    def files(self) -> dict[str, WeightsFile]:
        """The files of the model and of everything that is loaded with it, by key relative to the model's key."""
        found: dict[str, WeightsFile] = {"": self}
        found |= {f".adapters.{name}": one for name, one in self.adapters.items()}
        if self.projector is not None:
            found[".projector"] = self.projector
        return found | {f".signals.{kind}": one for kind, one in self.signals.items()}

    @property
    def images(self) -> dict[str, str]:
        """The paths of the golden prompts' images, by key relative to the model's key."""
        by_key = {"": self.golden} | {f".adapters.{name}": one.golden for name, one in self.adapters.items()}
        return {
            f"{key}.golden[{index}].image": one.image
            for key, prompts in by_key.items()
            for index, one in enumerate(prompts)
            if one.image is not None
        }


class CohortDoc(_Part, frozen=True):
    """The devices whose labels match, and their policy, models and settings."""

    policy: str
    match: dict[Label, Label] = {}
    signals: Annotated[tuple[str, ...], Meta(min_length=1)] | None = None
    models: dict[Name, ModelDoc] = {}
    settings: dict[str, SettingValue] = {}
    min_daemon: Annotated[Release, Meta(title="a release such as 1.2.3")] = "0.0.0"
    leaving: Leaving = "refuse"
    rollout: RolloutDoc = RolloutDoc()
    replay: ReplayDoc = ReplayDoc()

    @property
    def adapters(self) -> dict[str, tuple[str, ...]]:
        """The names of each model's adapters."""
        return {model: tuple(doc.adapters) for model, doc in self.models.items()}


@described
class FleetDoc(_Part, frozen=True):
    """The content of `fleet.yaml`."""

    version: Literal[1]
    name: Annotated[Name, Meta(title="a name of 1 to 64 letters, digits or . _ -")]
    cohorts: Annotated[dict[Name, CohortDoc], Meta(min_length=1)]


def cohort_of(fleet: FleetDoc, labels: dict[str, str]) -> str | None:
    """Return the name of the first cohort that matches a device's labels; None if there is none."""
    for name, cohort in fleet.cohorts.items():
        if cohort.match.items() <= labels.items():
            return name
    return None
