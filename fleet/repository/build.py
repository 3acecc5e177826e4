"""Building of bundles from a fleet's folder. Equal content has an equal id, on every machine and at any time."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from causeway_server.router.bundle.manifest import (
    Blob,
    BundleAdapter,
    BundleManifest,
    BundleModel,
    BundleProjector,
    BundleSignal,
    GoldenPrompt,
    SignalKind,
    blob_of,
    bundle_id,
    check_manifest,
    format_of,
)
from causeway_server.router.bundle.settings import read_setting

from .fleet_file import AdapterDoc, CohortDoc, ModelDoc, ProjectorDoc, SignalDoc, WeightsFile
from .folder import CheckedFleet, cases_of


class BuiltBundle(msgspec.Struct, frozen=True):
    """A bundle of a cohort, and the files of its blobs by sha256, without those uploaded earlier."""

    manifest: BundleManifest
    files: Mapping[str, Path]

    @property
    def id(self) -> str:
        return bundle_id(self.manifest)


def build_bundles(checked: CheckedFleet, previous: Mapping[str, BundleManifest], now_s: int) -> dict[str, BuiltBundle]:
    """Build the bundle of every cohort of a fleet without errors.

    A cohort whose content is that of its last signed bundle (`previous`) keeps it, with serial and time, so that the id
    does not change; otherwise the serial grows by one. `now_s`: time of new bundles, Unix seconds.

    Raises:
        ValueError, OSError: The fleet has errors, or a file cannot be read.
        BundleInvalid: A setting may not be set by a fleet, or a projector or signal was made for other weights.
    """
    if checked.fleet is None or checked.failed:
        raise ValueError(f"{checked.path} has errors.")
    built = {}
    for name, cohort in checked.fleet.cohorts.items():
        last = previous.get(name)
        bundle = _build(checked.folder, name, cohort, last.serial if last else 1, last.created if last else now_s)
        if last is not None and bundle.manifest != last:
            manifest = msgspec.structs.replace(bundle.manifest, serial=last.serial + 1, created=now_s)
            bundle = msgspec.structs.replace(bundle, manifest=manifest)
        check_manifest(bundle.manifest)
        built[name] = bundle
    return built


def _build(folder: Path, name: str, cohort: CohortDoc, serial: int, created: int) -> BuiltBundle:
    policy = folder / cohort.policy
    paths = [policy, *cases_of(policy)]
    contents = [blob_of(path.read_bytes()) for path in paths]
    files = {blob.sha256: path for blob, path in zip(contents, paths, strict=True)}
    models = []
    for model, doc in sorted(cohort.models.items()):
        models.append(_model(folder, model, doc, files))
    manifest = BundleManifest(
        format=1,
        cohort=name,
        serial=serial,
        created=created,
        policy=contents[0],
        # Sorted by content, so that renaming a case file changes nothing on a device.
        cases=tuple(sorted(set(contents[1:]), key=lambda blob: blob.sha256)),
        models=tuple(models),
        settings={key: read_setting(key, value) for key, value in sorted(cohort.settings.items())},
        min_daemon=cohort.min_daemon,
        leaving=cohort.leaving,
    )
    return BuiltBundle(msgspec.structs.replace(manifest, format=format_of(manifest)), files)


def _model(folder: Path, name: str, doc: ModelDoc, files: dict[str, Path]) -> BundleModel:
    """Return a model of the bundle, and add its files to `files` by their sha256."""
    adapters = tuple(
        BundleAdapter(adapter, _weights_blob(folder, one, files), one.scale, _golden(folder, one, files))
        for adapter, one in sorted(doc.adapters.items())
    )
    blob = _weights_blob(folder, doc, files)
    projector = None if doc.projector is None else _projector(folder, doc.projector, blob, files)
    signals = tuple(_signal(folder, kind, one, files) for kind, one in sorted(doc.signals.items()))
    return BundleModel(name, blob, _golden(folder, doc, files), adapters, projector, signals)


def _signal(folder: Path, kind: SignalKind, doc: SignalDoc, files: dict[str, Path]) -> BundleSignal:
    assert doc.model_sha256 is not None
    return BundleSignal(kind, _weights_blob(folder, doc, files), doc.model_sha256)


def _projector(folder: Path, doc: ProjectorDoc, model: Blob, files: dict[str, Path]) -> BundleProjector:
    return BundleProjector(_weights_blob(folder, doc, files), doc.model_sha256 or model.sha256)


def _golden(folder: Path, doc: ModelDoc | AdapterDoc, files: dict[str, Path]) -> tuple[GoldenPrompt, ...]:
    return tuple(
        GoldenPrompt(one.prompt, one.answer, None if one.image is None else _file_blob(folder / one.image, files))
        for one in doc.golden
    )


def _weights_blob(folder: Path, doc: WeightsFile, files: dict[str, Path]) -> Blob:
    if doc.file is None:
        assert doc.sha256 is not None
        assert doc.size_bytes is not None
        return Blob(doc.sha256, doc.size_bytes)
    return _file_blob(folder / doc.file, files)


def _file_blob(path: Path, files: dict[str, Path]) -> Blob:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    files[digest] = path
    return Blob(digest, path.stat().st_size)
