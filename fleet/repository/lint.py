"""The checks of `fleet.yaml` that its grammar cannot say. Pure: files are checked in `folder`."""

from __future__ import annotations

from collections.abc import Iterator

from router.bundle.manifest import is_scale
from router.bundle.settings import read_setting
from router.documents.reader import KeyLocations, did_you_mean
from router.documents.strict_yaml import Problem
from router.policy.signals import SIGNALS

from .fleet_file import FleetDoc, ModelDoc, ProjectorDoc, WeightsFile, is_hasty, rollout_problems


def fleet_problems(fleet: FleetDoc, locations: KeyLocations) -> tuple[Problem, ...]:
    """Check settings against the keys that a fleet may set, models, stages, and cohorts that no box can reach."""
    cohorts = (problem for name in fleet.cohorts for problem in _cohort(fleet, name, locations))
    return (*_unreachable(fleet, locations), *cohorts)


def _unreachable(fleet: FleetDoc, locations: KeyLocations) -> Iterator[Problem]:
    """A cohort behind one with fewer or the same labels gets no box, because the first that matches wins."""
    names = list(fleet.cohorts)
    for index, name in enumerate(names):
        for earlier in names[:index]:
            if fleet.cohorts[earlier].match.items() <= fleet.cohorts[name].match.items():
                message = f"no box can reach this cohort: {earlier} above matches all of its boxes; move it above"
                yield Problem(locations.find(f"cohorts.{name}"), message)
                break


def _cohort(fleet: FleetDoc, name: str, locations: KeyLocations) -> Iterator[Problem]:
    cohort, path = fleet.cohorts[name], f"cohorts.{name}"
    for index, signal in enumerate(cohort.signals or ()):
        if signal not in SIGNALS:
            yield Problem(
                locations.find(f"{path}.signals[{index}]"), f"unknown signal `{signal}`{did_you_mean(signal, SIGNALS)}"
            )
    for key, value in cohort.settings.items():
        try:
            read_setting(key, value)
        except ValueError as error:
            yield Problem(locations.find(f"{path}.settings.{key}"), str(error))
    for model, doc in cohort.models.items():
        for key, message in _model(doc):
            yield Problem(locations.find(f"{path}.models.{model}{key}"), message)
    for key, message in rollout_problems(cohort.rollout):
        yield Problem(locations.find(f"{path}.rollout.{key}"), message)
    if is_hasty(cohort.rollout):
        message = (
            "a healthy box without requests reports every 5 to 6 minutes: with less than 6m it counts as silent, "
            "unless `fleet.telemetry_s` of the boxes is short and they always have requests"
        )
        yield Problem(locations.find(f"{path}.rollout.silence"), message, "warning")


def _model(doc: ModelDoc) -> Iterator[tuple[str, str]]:
    """Yield (key below the model's, message)."""
    for key, one in doc.files.items():
        if message := _weights(one):
            yield key, message
    for name, adapter in doc.adapters.items():
        if not is_scale(adapter.scale):
            yield f".adapters.{name}.scale", "must be a finite number other than 0"
    yield from _signals(doc)
    if doc.projector is not None:
        yield from _projector(doc, doc.projector)
    else:
        for key in doc.pictures:
            yield key, "the model has no `projector`, which a picture needs"


def _projector(model: ModelDoc, doc: ProjectorDoc) -> Iterator[tuple[str, str]]:
    if doc.encoder is None and doc.tokens is not None:
        yield ".projector.tokens", "belongs to a projector with `encoder`; an mmproj file decides by itself"
    if doc.encoder is not None and doc.tokens is None:
        yield ".projector", "needs `tokens`, as the model's manifest.json says it"
    if doc.encoder is not None and doc.model_sha256 is None:
        yield ".projector", "needs `model_sha256`, the weights it was trained for, as the model's manifest.json says it"
    if None not in (doc.model_sha256, model.sha256) and doc.model_sha256 != model.sha256:
        yield ".projector.model_sha256", f"the model's weights are {model.sha256}: the projector was made for others"


def _signals(model: ModelDoc) -> Iterator[tuple[str, str]]:
    for kind, doc in model.signals.items():
        if doc.model_sha256 is None:
            yield (
                f".signals.{kind}",
                "needs `model_sha256`, the weights it was fitted on (its `judges_sha256`)",
            )
        elif model.sha256 is not None and doc.model_sha256 != model.sha256:
            yield (
                f".signals.{kind}.model_sha256",
                f"the model's weights are {model.sha256}: the signal was fitted on others",
            )
    if model.signals and model.uncalibrated:
        yield ".uncalibrated", "the model has `signals`: remove one of both"


def _weights(doc: WeightsFile) -> str:
    """Return what is wrong, or ""."""
    if (doc.file is None) == (doc.sha256 is None):
        return "needs either `file`, or `sha256` and `size_bytes` of an uploaded file"
    if (doc.sha256 is None) != (doc.size_bytes is None):
        return "`sha256` and `size_bytes` belong together; a `file` needs neither"
    return ""
