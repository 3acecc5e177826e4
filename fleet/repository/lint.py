"""The checks of `fleet.yaml` that its grammar cannot say. Pure: files are checked in `folder`."""

from __future__ import annotations

from collections.abc import Iterator

from router.bundle.manifest import is_scale
from router.bundle.settings import read_setting
from router.documents.reader import KeyLocations, did_you_mean
from router.documents.strict_yaml import Problem
from router.policy.signals import SIGNALS

from .fleet_file import AdapterDoc, FleetDoc, ModelDoc
from .rollout_keys import rollout_problems


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
        if message := _weights(doc):
            yield Problem(locations.find(f"{path}.models.{model}"), message)
        for adapter, one in doc.adapters.items():
            key = f"{path}.models.{model}.adapters.{adapter}"
            if message := _weights(one):
                yield Problem(locations.find(key), message)
            if not is_scale(one.scale):
                yield Problem(locations.find(f"{key}.scale"), "must be a finite number other than 0")
    for key, message in rollout_problems(cohort.rollout):
        yield Problem(locations.find(f"{path}.rollout.{key}"), message)


def _weights(doc: ModelDoc | AdapterDoc) -> str:
    """Return what is wrong, or ""."""
    if (doc.file is None) == (doc.sha256 is None):
        return "needs either `file`, or `sha256` and `size_bytes` of an uploaded file"
    if (doc.sha256 is None) != (doc.size_bytes is None):
        return "`sha256` and `size_bytes` belong together; a `file` needs neither"
    return ""
