"""A bundle that a daemon of the version before installed, and one that a control plane of before signs now."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from causeway_server.edge_node.agent.journal import boot
from causeway_server.edge_node.agent.store import BundleStore, Disk
from causeway_server.models.catalog.artifact import Manifest, ProjectorEntry
from causeway_server.router.bundle.manifest import (
    Blob,
    BundleManifest,
    BundleModel,
    BundleProjector,
    GoldenPrompt,
    blob_of,
    decode_signed,
    encode_canonical,
    read_manifest,
)
from causeway_server.router.bundle.refusals import BundleInvalid

POLICY = b"""\
version: 1
name: till
targets: {small: {at: edge, model: m}}
routes: [{name: text, when: pictures.text, use: [small]}, {name: all, use: [small]}]
"""
WEIGHTS, MMPROJ, IMAGE = b"GGUF", b"mmproj", b"PNG"


def manifest() -> BundleManifest:
    projector = BundleProjector(blob_of(MMPROJ), blob_of(WEIGHTS).sha256)
    golden = (GoldenPrompt('"picture": {', "b", blob_of(IMAGE)),)
    return BundleManifest(
        format=1,
        cohort="tills",
        serial=3,
        created=1_700_000_000,
        policy=blob_of(POLICY),
        cases=(),
        models=(BundleModel("m", blob_of(WEIGHTS), golden, projector=projector),),
        settings={"decisions.signals": "named", "parts.max_parts": 3},
        min_daemon="0.0.0",
    )


def before(content: bytes) -> bytes:
    """The bytes of the manifest as a control plane of before signed it."""
    for new, old in (
        (b'"image":', b'"picture":'),
        (
            b'"decisions.signals":"named","parts.max_parts"',
            b'"decisions.record":"cheap","jobs.max_revise_s":60.0,"modalities.max_parts"',  # one was removed
        ),
    ):
        assert new in content
        content = content.replace(new, old)
    return content


@pytest.fixture
def installed(tmp_path: Path) -> str:
    """The state of a device that runs such a bundle; returns its id."""
    store = BundleStore(tmp_path, Disk(), "1.0.0")
    store.missing(manifest().blobs)
    for content in (POLICY, WEIGHTS, MMPROJ, IMAGE):
        store.blob(blob_of(content)).write_bytes(content)
    content = before(encode_canonical(manifest()))
    bundle = hashlib.sha256(content).hexdigest()
    store.stage(bundle, manifest(), {"m": artifact(blob_of(WEIGHTS), blob_of(MMPROJ))})
    folder = tmp_path / "bundles" / bundle
    (folder / "manifest.json").write_bytes(content)
    image = folder / "models" / "m" / f"image-{blob_of(IMAGE).sha256}"
    image.rename(image.with_name(f"picture-{blob_of(IMAGE).sha256}"))
    store.point([bundle])
    return bundle


def artifact(weights: Blob, mmproj: Blob) -> Manifest:
    return Manifest(
        name="m",
        file="model.gguf",
        sha256=weights.sha256,
        size_bytes=weights.size_bytes,
        format="gguf",
        architecture="",
        quantisation="",
        context_length=0,
        licence="",
        projector=ProjectorEntry("mmproj.gguf", mmproj.sha256, mmproj.size_bytes, weights.sha256),
    )


def test_a_device_goes_on_with_the_bundle_that_it_ran(installed: str, tmp_path: Path) -> None:
    """Its settings, the images of its prompts and the signals of its policy have today's names; its files stay."""
    for _ in range(2):  # what was renamed at the first start is found at the next
        bundle = boot(tmp_path, "1.0.0", 0.0).bundle
        assert bundle is not None
        assert (bundle.id, bundle.manifest) == (installed, manifest())
        assert bundle.policy.read_bytes() == POLICY.replace(b"pictures.text", b"images.text")
        assert (bundle.models / "m" / f"image-{blob_of(IMAGE).sha256}").read_bytes() == IMAGE
    BundleStore(tmp_path, Disk(), "1.0.0").collect([installed])
    assert boot(tmp_path, "1.0.0", 0.0).bundle == bundle


def test_a_new_bundle_with_old_names_is_refused_by_name() -> None:
    """The device keeps what it runs, as with every bundle that is refused."""
    content = before(encode_canonical(manifest()))
    with pytest.raises(BundleInvalid, match=r"`picture` .*; it is now `image`"):
        read_manifest(content, hashlib.sha256(content).hexdigest(), "1.0.0")
    content = content.replace(b'"picture":', b'"image":')
    with pytest.raises(BundleInvalid, match=r"settings\.decisions\.record`: `decisions\.record` is now"):
        read_manifest(content, hashlib.sha256(content).hexdigest(), "1.0.0")


def test_a_control_plane_reads_what_it_signed_before() -> None:
    """It differs from what is signed today, so that the next bundle is a new one."""
    signed = decode_signed(before(encode_canonical(manifest())))
    settings = {"decisions.record": "cheap", "jobs.max_revise_s": 60.0, "modalities.max_parts": 3}
    assert (signed.serial, signed.settings) == (3, settings)
    assert signed != manifest()
    assert decode_signed(encode_canonical(manifest())) == manifest()
