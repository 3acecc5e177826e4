"""The trials of all targets or tiers: counts of both arms, verdicts, and the shares that follow from them.

A trial compares one variant with the model that it may replace, over the same time. It begins with the variant, and
again when its share or one of the models changes. A verdict is final: a returned variant gets no request until it is
removed from the file, or another share is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final, Literal, cast

import msgspec

from ..types import Request
from .assignment import assign, group_of, unit_of
from .settings import ERRORS, FEEDBACK, LATENCY, TrialConfig, VariantConfig
from .verdict import Tally, VerdictOutcome, judge_metric

State = Literal["running", "returned", "promoted"]
Counts = dict[str, float]
"""Events and answers of a trial by ``metric|arm|events or answers|group``; arm 0 is the variant's, 1 the baseline's."""
_LOOK_EVERY: Final = 10  # observations of a variant between two looks; the test allows any number


class TrialPlace(msgspec.Struct, frozen=True):
    """A target or tier with variants. `model`: its own. `shadows`: variants that get copies and answer nothing."""

    model: str
    variants: tuple[VariantConfig, ...]
    trial: TrialConfig
    shadows: frozenset[str] = frozenset()


class TrialRecord(msgspec.Struct, frozen=True):
    """A trial as it is kept over a restart: events and answers by metric and group, of both arms."""

    place: str
    model: str
    variant: VariantConfig
    state: State
    reason: str
    counts: dict[str, tuple[list[float], list[float], list[float], list[float]]]


class Trial:
    """The comparison of one variant. `reason`: what the last look found."""

    def __init__(self, place: str, model: str, variant: VariantConfig, config: TrialConfig) -> None:
        self.place, self.model, self.variant, self.config = place, model, variant, config
        self.state: State = "running"
        self.reason = "no answer yet"
        self.arms = {metric.name: (Tally(), Tally()) for metric in config.metrics}
        self._since_look = 0
        self._new: Counts = {}

    @property
    def share(self) -> float:
        """The share in force, in percent."""
        return {"running": self.variant.share, "returned": 0.0, "promoted": 100.0}[self.state]

    @property
    def sentence(self) -> str:
        """The trial's state in a sentence, for logs and lists of problems."""
        ended = f"is {self.state} and answers {self.share:g} % of the requests"
        return f"The variant {self.variant.model} of {self.place} {ended}: {self.reason}."

    def add(self, metric: str, group: int, event: float, *, of_variant: bool) -> bool:
        """Count an answer in a metric; return whether the trial's state changed."""
        if metric not in self.arms or self.state != "running":
            return False
        arm = 0 if of_variant else 1
        self.arms[metric][arm].add(group, event)
        for kind, amount in (("events", event), ("answers", 1.0)):
            field = f"{metric}|{arm}|{kind}|{group}"
            self._new[field] = self._new.get(field, 0.0) + amount
        self._since_look += of_variant
        return self._since_look >= _LOOK_EVERY and self.look()

    def take_new(self) -> Counts:
        """Return what was counted since the last call."""
        new, self._new = self._new, {}
        return new

    def share_counts(self, fields: Mapping[str, str]) -> bool:
        """Take over the sums of all processes, by the keys of `Counts`, but for those since `take_new`, and the first
        verdict's `state` and `reason`; return whether the state changed.
        """
        for name, arms in self.arms.items():
            for arm, tally in enumerate(arms):
                for kind, sums in (("events", tally.events), ("answers", tally.answers)):
                    for group in range(Tally.GROUPS):
                        field = f"{name}|{arm}|{kind}|{group}"
                        sums[group] = float(fields.get(field, 0.0)) + self._new.get(field, 0.0)
        if (state := fields.get("state", self.state)) != self.state:
            self.state, self.reason = cast("State", state), fields.get("reason", "")
            return True
        return self.state == "running" and self.look()

    def look(self) -> bool:
        """Judge every metric, and return whether the state changed."""
        self._since_look = 0
        config = self.config
        found = [
            judge_metric(*self.arms[metric.name], metric, config.least, len(config.metrics))
            for metric in config.metrics
        ]
        failed = [one.reason for one in found if one.outcome is VerdictOutcome.FAIL]
        passed = all(one.outcome is VerdictOutcome.PASS for one in found)
        self.reason = "; ".join(failed or [one.reason for one in found])
        self.state = "returned" if failed else "promoted" if passed and config.promote else "running"
        return self.state != "running"

    def record(self) -> TrialRecord:
        counts = {
            name: (variant.events, variant.answers, baseline.events, baseline.answers)
            for name, (variant, baseline) in self.arms.items()
        }
        return TrialRecord(self.place, self.model, self.variant, self.state, self.reason, counts)

    def restore(self, record: TrialRecord) -> None:
        """Go on with a recorded trial of the same models and share; counts of metrics that it still has."""
        if (record.place, record.model, record.variant) != (self.place, self.model, self.variant):
            return
        self.state, self.reason = record.state, record.reason
        for name, counts in record.counts.items():
            if name in self.arms and all(len(one) == Tally.GROUPS for one in counts):
                self.arms[name] = Tally(*counts[:2]), Tally(*counts[2:])


class Trials:
    """The trials of one process on a `device` ("" at a gateway); `decided` gets each whose state has changed."""

    def __init__(self, device: str = "", decided: Callable[[Trial], None] = lambda _: None) -> None:
        self._device = device
        self._decided = decided
        self._places: Mapping[str, TrialPlace] = {}
        self._trials: dict[tuple[str, str], Trial] = {}
        self._records: dict[tuple[str, str], TrialRecord] = {}

    def __bool__(self) -> bool:
        return bool(self._places)

    def __iter__(self) -> Iterator[Trial]:
        return iter(self._trials.values())

    def use(self, places: Mapping[str, TrialPlace]) -> None:
        """Follow another configuration. Trials whose models and share are the same go on."""
        self._records |= {(one.place, one.variant.model): one.record() for one in self}
        self._places = {name: place for name, place in places.items() if place.variants}
        self._trials = {}
        for name, place in self._places.items():
            for variant in place.variants:
                trial = self._trials[name, variant.model] = Trial(name, place.model, variant, place.trial)
                if (record := self._records.get((name, variant.model))) is not None:
                    trial.restore(record)
        self._records = {}

    def restore(self, data: bytes) -> None:
        """Go on with the trials that `dump` wrote in an earlier process; a file that cannot be read is ignored."""
        try:
            records = msgspec.json.decode(data, type=list[TrialRecord])
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        self._records = {(one.place, one.variant.model): one for one in records}
        for key, record in self._records.items():
            if key in self._trials:
                self._trials[key].restore(record)

    def dump(self) -> bytes:
        """Return all trials as JSON."""
        return msgspec.json.encode([trial.record() for trial in self])

    def share(self, trial: Trial, fields: Mapping[str, str]) -> None:
        """Take over the sums and the verdict of all processes in a trial, as `Trial.share_counts`."""
        if self._trials.get((trial.place, trial.variant.model)) is trial and trial.share_counts(fields):
            self._decided(trial)

    def assigned(self, request: Request, *, shadow: bool = False) -> dict[str, str]:
        """Return the model of each place that a variant takes for a request. `shadow`: for a copy of it."""
        found = {}
        for name, place in self._places.items():
            unit = unit_of(request, place.trial.sticky, self._device)
            variants = [one for one in place.variants if (one.model in place.shadows) is shadow]
            model = assign(name, unit, variants, lambda one, at=name: self._trials[at, one.model].share)  # type: ignore[misc]
            if model:
                found[name] = model
        return found

    def group(self, place: str, request: Request) -> int | None:
        """Return the group of a request's unit; None for a place without variants."""
        found = self._places.get(place)
        return None if found is None else group_of(unit_of(request, found.trial.sticky, self._device))

    def answered(self, place: str, variant: str, group: int, *, failed: bool, duration_s: float) -> None:
        """Count an answer, or a failure, of a variant ("" for the place's own model)."""
        self._count(place, variant, group, ERRORS, lambda _: float(failed))
        if not failed:
            self._count(place, variant, group, LATENCY, lambda over_s: float(duration_s > over_s))

    def scored(self, place: str, variant: str, group: int, score: float, label: str) -> None:
        """Count a client's score of an answer, 0 to 1, under its label or without one."""
        self._count(place, variant, group, label or FEEDBACK, lambda _: 1.0 - score)

    def _count(self, place: str, variant: str, group: int, name: str, event: Callable[[float], float]) -> None:
        for trial in [one for (at, _), one in self._trials.items() if at == place]:
            metric = next((one for one in trial.config.metrics if one.name == name), None)
            mine = trial.variant.model == variant
            if (
                metric is not None
                and (mine or not variant)
                and trial.add(name, group, event(metric.over_s), of_variant=mine)
            ):
                self._decided(trial)
