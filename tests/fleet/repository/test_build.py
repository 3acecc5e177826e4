"""Bundles: equal content has an equal id; a change is a new serial; what a device gets is what stands in the folder."""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from causeway_server.fleet.cli.rollout_output import manifest_changes
from causeway_server.fleet.repository.build import BuiltBundle, build_bundles
from causeway_server.fleet.repository.fleet_file import cohort_of
from causeway_server.fleet.repository.folder import check_fleet
from causeway_server.router.bundle.manifest import BundleManifest, encode_canonical, read_manifest
from causeway_server.router.bundle.refusals import BundleInvalid

from .fleets import edit, write_fleet

WEIGHTS = hashlib.sha256(b"GGUF and weights").hexdigest()


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    return write_fleet(tmp_path / "fleet")


def build(folder: Path, previous: dict[str, BundleManifest] | None = None, now_s: int = 1000) -> dict[str, BuiltBundle]:
    return build_bundles(check_fleet(folder), previous or {}, now_s)


def test_a_bundle_holds_what_the_folder_says(fleet: Path) -> None:
    bundle = build(fleet)["kiosk"]
    manifest = bundle.manifest
    assert (manifest.cohort, manifest.serial, manifest.created, manifest.min_daemon) == ("kiosk", 1, 1000, "0.1.0")
    assert manifest.settings == {"engine.threads": 4, "cloud.timeout_s": 30.0, "cache.memory_bytes": 1 << 26}
    assert [model.golden[0].answer for model in manifest.models] == ["4"]
    assert {blob.sha256 for blob in manifest.blobs} == set(bundle.files)
    assert bundle.files[manifest.policy.sha256] == fleet / "policies" / "kiosk.yaml"
    assert bundle.files[manifest.cases[0].sha256] == fleet / "policies" / "cases" / "kiosk.yaml"
    assert read_manifest(encode_canonical(manifest), bundle.id, "0.1.0") == manifest


def test_the_same_content_has_the_same_id_anywhere(fleet: Path, tmp_path: Path) -> None:
    """In another folder, with other file times, other names of case files and another order of keys."""
    copy = Path(shutil.copytree(fleet, tmp_path / "copy"))
    os.utime(copy / "policies" / "kiosk.yaml", (1, 1))
    (copy / "policies" / "cases" / "kiosk.yaml").rename(copy / "policies" / "cases" / "a.yaml")
    edit(copy / "fleet.yaml", "      engine.threads: 4\n      cloud.timeout_s: 30s\n", "      cloud.timeout_s: 30\n")
    edit(copy / "fleet.yaml", "    min_daemon", "      engine.threads: 4\n    min_daemon")
    assert {name: one.id for name, one in build(copy).items()} == {name: one.id for name, one in build(fleet).items()}


def test_an_unchanged_cohort_keeps_its_bundle(fleet: Path) -> None:
    first = build(fleet)
    previous = {name: one.manifest for name, one in first.items()}
    edit(fleet / "policies" / "others.yaml", "device", "on-device")
    later = build(fleet, previous, now_s=5000)
    assert later["kiosk"].id == first["kiosk"].id
    assert (later["others"].manifest.serial, later["others"].manifest.created) == (2, 5000)


def change_model(fleet: Path) -> None:
    (fleet / "models" / "assistant.gguf").write_bytes(b"GGUF and other weights")


def change_golden(fleet: Path) -> None:
    edit(fleet / "fleet.yaml", 'answer: "4"', 'answer: "four"')


def change_setting(fleet: Path) -> None:
    edit(fleet / "fleet.yaml", "64MiB", "65MiB")


def change_case(fleet: Path) -> None:
    edit(fleet / "policies" / "cases" / "kiosk.yaml", "the device answers", "the device answers all")


def change_daemon(fleet: Path) -> None:
    edit(fleet / "fleet.yaml", "min_daemon: 0.1.0", "min_daemon: 0.2.0")


def add_adapter(fleet: Path) -> None:
    (fleet / "models" / "night.gguf").write_bytes(b"GGUF and an adapter")
    adapters = "adapters: {night: {file: models/night.gguf, scale: 0.5, golden: [{prompt: a, answer: b}]}}"
    edit(fleet / "fleet.yaml", "file: models/assistant.gguf", f"file: models/assistant.gguf\n        {adapters}")


def add_signal(fleet: Path) -> None:
    (fleet / "models" / "confidence.json").write_bytes(b"{}")
    keys = f"signals: {{confidence: {{file: models/confidence.json, model_sha256: {WEIGHTS}}}}}"
    edit(fleet / "fleet.yaml", "file: models/assistant.gguf", f"file: models/assistant.gguf\n        {keys}")


@pytest.mark.parametrize(
    "change", [change_model, change_golden, change_setting, change_case, change_daemon, add_adapter, add_signal]
)
def test_each_part_counts(fleet: Path, change: Callable[[Path], None]) -> None:
    first = build(fleet)
    change(fleet)
    later = build(fleet, {name: one.manifest for name, one in first.items()})
    assert later["kiosk"].manifest.serial == 2
    assert later["others"].id == first["others"].id


def test_the_stages_are_no_part_of_the_bundle(fleet: Path) -> None:
    """Another pace of the rollout is no new bundle for the devices."""
    first = build(fleet)
    edit(fleet / "fleet.yaml", "[1, 50, 100]", "[10, 100]")
    assert build(fleet)["kiosk"].id == first["kiosk"].id


def test_an_uploaded_model_needs_no_file(fleet: Path) -> None:
    edit(fleet / "fleet.yaml", "file: models/assistant.gguf", f"sha256: {'a' * 64}\n        size_bytes: 7")
    bundle = build(fleet)["kiosk"]
    assert bundle.manifest.models[0].blob.size_bytes == 7
    assert "a" * 64 not in bundle.files


def test_an_adapter_is_a_part_of_its_model(fleet: Path) -> None:
    add_adapter(fleet)
    bundle = build(fleet)["kiosk"]
    (adapter,) = bundle.manifest.models[0].adapters
    assert (adapter.name, adapter.scale, adapter.golden[0].answer) == ("night", 0.5, "b")
    assert bundle.files[adapter.blob.sha256] == fleet / "models" / "night.gguf"
    assert {blob.sha256 for blob in bundle.manifest.blobs} == set(bundle.files)


@pytest.mark.slow
def test_a_changed_adapter_is_told_apart(fleet: Path) -> None:
    """Added, other weights, another scale, other golden prompts, removed."""
    manifests = [build(fleet)["kiosk"].manifest]
    add_adapter(fleet)
    manifests.append(build(fleet)["kiosk"].manifest)
    (fleet / "models" / "night.gguf").write_bytes(b"GGUF and other weights")
    manifests.append(build(fleet)["kiosk"].manifest)
    for old, new in (("scale: 0.5", "scale: 1"), ("answer: b", "answer: c"), ("adapters: {night:", "adapters: {day:")):
        edit(fleet / "fleet.yaml", old, new)
        manifests.append(build(fleet)["kiosk"].manifest)
    assert [manifest_changes(old, new) for old, new in itertools.pairwise(manifests)] == [
        ["adapter assistant+night: added, 0.0 MB"],
        ["adapter assistant+night: other weights, 0.0 MB -> 0.0 MB"],
        ["adapter assistant+night: scale 0.5 -> 1"],
        ["adapter assistant+night: other golden prompts"],
        ["adapter assistant+day: added, 0.0 MB", "adapter assistant+night: removed"],
    ]


def add_projector(fleet: Path) -> None:
    for name in ("eye.gguf", "stove.png"):
        (fleet / "models" / name).write_bytes(name.encode())
    keys = f"file: models/eye.gguf, model_sha256: {WEIGHTS}"
    edit(
        fleet / "fleet.yaml",
        "file: models/assistant.gguf",
        f"file: models/assistant.gguf\n        projector: {{{keys}}}",
    )


def test_a_projector_is_a_part_of_its_model(fleet: Path) -> None:
    add_projector(fleet)
    edit(fleet / "fleet.yaml", 'answer: "4"', 'answer: "4", image: models/stove.png')
    bundle = build(fleet)["kiosk"]
    (model,) = bundle.manifest.models
    assert model.projector is not None
    assert model.projector.model_sha256 == model.blob.sha256
    named = [bundle.files[blob.sha256].name for blob in (model.projector.blob, *model.images)]
    assert named == ["eye.gguf", "stove.png"]
    assert {blob.sha256 for blob in bundle.manifest.blobs} == set(bundle.files)


def test_a_projector_of_other_weights_is_not_built(fleet: Path) -> None:
    """The model is a file, whose hash `lint` does not compute."""
    add_projector(fleet)
    (fleet / "models" / "assistant.gguf").write_bytes(b"GGUF and other weights")
    with pytest.raises(BundleInvalid, match=f"made for the weights {WEIGHTS[:12]}"):
        build(fleet)


def test_a_changed_projector_is_told_apart(fleet: Path) -> None:
    manifests = [build(fleet)["kiosk"].manifest]
    add_projector(fleet)
    manifests.append(build(fleet)["kiosk"].manifest)
    (fleet / "models" / "eye.gguf").write_bytes(b"another one")
    manifests += [build(fleet)["kiosk"].manifest, manifests[0]]
    assert [manifest_changes(old, new) for old, new in itertools.pairwise(manifests)] == [
        ["projector of assistant: added, 0.0 MB"],
        ["projector of assistant: other weights, 0.0 MB -> 0.0 MB"],
        ["projector of assistant: removed"],
    ]


def test_signals_travel_with_the_weights_that_they_were_fitted_on(fleet: Path) -> None:
    first = build(fleet)["kiosk"].manifest
    add_signal(fleet)
    bundle = build(fleet)["kiosk"]
    (signal,) = bundle.manifest.models[0].signals
    assert (signal.kind, signal.model_sha256, bundle.manifest.format) == ("confidence", WEIGHTS, 2)
    assert bundle.files[signal.blob.sha256] == fleet / "models" / "confidence.json"
    assert read_manifest(encode_canonical(bundle.manifest), bundle.id, "0.1.0") == bundle.manifest
    assert manifest_changes(first, bundle.manifest) == ["signal confidence of assistant: added"]
    assert manifest_changes(bundle.manifest, first) == ["signal confidence of assistant: removed"]
    edit(fleet / "fleet.yaml", "min_daemon", "leaving: report\n    min_daemon")
    (fleet / "models" / "confidence.json").write_bytes(b"{ }")
    assert manifest_changes(bundle.manifest, build(fleet)["kiosk"].manifest) == [
        "signal confidence of assistant: changed",
        "leaving: refuse -> report",
    ]


def test_a_signal_of_other_weights_is_not_built(fleet: Path) -> None:
    add_signal(fleet)
    (fleet / "models" / "assistant.gguf").write_bytes(b"GGUF and other weights")
    with pytest.raises(BundleInvalid, match=f"confidence was fitted on the weights {WEIGHTS[:12]}"):
        build(fleet)


def test_a_fleet_with_errors_is_not_built(fleet: Path) -> None:
    (fleet / "models" / "assistant.gguf").unlink()
    with pytest.raises(ValueError, match="has errors"):
        build(fleet)


def test_a_device_belongs_to_the_first_cohort_that_matches(fleet: Path) -> None:
    doc = check_fleet(fleet).fleet
    assert doc is not None
    assert cohort_of(doc, {"role": "kiosk", "site": "7"}) == "kiosk"
    assert cohort_of(doc, {"role": "till"}) == "others"
    assert cohort_of(doc, {}) == "others"
