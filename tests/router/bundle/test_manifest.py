"""A manifest has one encoding and one id; whatever differs from what was signed is refused."""

from __future__ import annotations

import hashlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from causeway_server.router.bundle.manifest import (
    MAX_MANIFEST_BYTES,
    BundleAdapter,
    BundleManifest,
    BundleModel,
    BundleProjector,
    BundleSignal,
    GoldenPrompt,
    blob_of,
    bundle_id,
    daemon_is_new_enough,
    encode_canonical,
    read_manifest,
)
from causeway_server.router.bundle.refusals import BundleAltered, BundleInvalid, DaemonTooOld, UpdateRefused

MANIFEST = BundleManifest(
    format=1,
    cohort="kiosk",
    serial=7,
    created=1_700_000_000,
    policy=blob_of(b"version: 1\n"),
    cases=(blob_of(b"cases: []\n"),),
    models=(BundleModel("assistant", blob_of(b"GGUF"), (GoldenPrompt("2+2?", "4"),)),),
    settings={"log": "info", "engine.threads": 4, "cloud.timeout_s": 30.0, "engine.enabled": True},
    min_daemon="0.1.0",
)


def read(content: bytes, version: str = "0.1.0") -> BundleManifest:
    return read_manifest(content, hashlib.sha256(content).hexdigest(), version)


ADAPTER = BundleAdapter("night", blob_of(b"LoRA"), 0.5, (GoldenPrompt("2+2?", "four"),))


def with_adapters(*adapters: BundleAdapter) -> BundleManifest:
    models = (msgspec.structs.replace(MANIFEST.models[0], adapters=adapters),)
    return msgspec.structs.replace(MANIFEST, models=models)


def altered(old: bytes, new: bytes) -> bytes:
    content = encode_canonical(MANIFEST)
    assert old in content
    return content.replace(old, new, 1)


def test_the_encoding_is_fixed() -> None:
    """Signed ids depend on it: this id changes only with a new `format`."""
    assert bundle_id(MANIFEST) == "8288fd73ab6a29834fed5604ab27ce81c69f18df54a4977c0f798070ee608dd1"


def test_reading_gives_what_was_written() -> None:
    assert read(encode_canonical(MANIFEST)) == MANIFEST
    assert read_manifest(encode_canonical(MANIFEST), bundle_id(MANIFEST), "0.1.0") == MANIFEST


@given(st.permutations(list(MANIFEST.settings)))
def test_the_order_of_settings_does_not_change_the_id(keys: list[str]) -> None:
    shuffled = msgspec.structs.replace(MANIFEST, settings={key: MANIFEST.settings[key] for key in keys})
    assert bundle_id(shuffled) == bundle_id(MANIFEST)


def test_adapters_are_files_of_the_bundle() -> None:
    """A model without any is encoded as if there were no such field: its bundles keep their ids."""
    manifest = with_adapters(ADAPTER)
    assert manifest.blobs == (*MANIFEST.blobs, ADAPTER.blob)
    assert read(encode_canonical(manifest)) == manifest
    assert b"adapters" not in encode_canonical(MANIFEST)
    with pytest.raises(BundleInvalid, match="not in canonical form"):
        read(altered(b'"answer":"4"}]', b'"answer":"4"}],"adapters":[]'))


@pytest.mark.parametrize(
    ("adapters", "words"),
    [
        ((ADAPTER, msgspec.structs.replace(ADAPTER, scale=1.0)), r"adapter assistant\+night twice"),
        ((msgspec.structs.replace(ADAPTER, scale=0.0),), r"assistant\+night has the scale 0"),
        ((msgspec.structs.replace(ADAPTER, name="a+b"),), r"adapters\[0\]\.name"),
        ((msgspec.structs.replace(ADAPTER, name="../x"),), r"adapters\[0\]\.name"),
    ],
)
def test_an_adapter_that_cannot_be_is_refused(adapters: tuple[BundleAdapter, ...], words: str) -> None:
    with pytest.raises(BundleInvalid, match=words):
        read(encode_canonical(with_adapters(*adapters)))


PROJECTOR = BundleProjector(blob_of(b"mmproj"), MANIFEST.models[0].blob.sha256)
IMAGE = GoldenPrompt("what is it?", "a stove", blob_of(b"PNG"))


def with_projector(projector: BundleProjector | None, *golden: GoldenPrompt) -> BundleManifest:
    model = msgspec.structs.replace(MANIFEST.models[0], projector=projector, golden=golden)
    return msgspec.structs.replace(MANIFEST, models=(model,))


def test_a_projector_and_images_are_files_of_the_bundle() -> None:
    """A model without them is encoded as if there were no such fields: its bundles keep their ids."""
    manifest = with_projector(PROJECTOR, IMAGE, IMAGE)
    assert manifest.blobs == (*MANIFEST.blobs, PROJECTOR.blob, IMAGE.image)
    assert read(encode_canonical(manifest)) == manifest
    assert manifest.models[0].loaded[1:] == (PROJECTOR.blob,)
    assert b"projector" not in encode_canonical(MANIFEST)
    assert b"image" not in encode_canonical(MANIFEST)


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        (with_projector(None, IMAGE), "assistant: a golden prompt has an image, but the model has no projector"),
        (
            with_projector(msgspec.structs.replace(PROJECTOR, model_sha256="a" * 64)),
            "assistant: its projector was made for the weights aaaaaaaaaaaa, but",
        ),
    ],
)
def test_a_projector_that_cannot_be_is_refused(manifest: BundleManifest, words: str) -> None:
    with pytest.raises(BundleInvalid, match=words):
        read(encode_canonical(manifest))


QUALITY = BundleSignal("edge.quality", blob_of(b"quality"), MANIFEST.models[0].blob.sha256)


def with_signals(*signals: BundleSignal, number: int = 2) -> BundleManifest:
    model = msgspec.structs.replace(MANIFEST.models[0], signals=signals)
    return msgspec.structs.replace(MANIFEST, models=(model,), format=number)


def test_signals_are_files_of_the_bundle_but_none_that_the_engine_loads() -> None:
    manifest = with_signals(QUALITY)
    assert manifest.blobs == (*MANIFEST.blobs, QUALITY.blob)
    assert manifest.models[0].loaded == MANIFEST.models[0].loaded
    assert read(encode_canonical(manifest)) == manifest
    assert b"signals" not in encode_canonical(MANIFEST)


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        (with_signals(QUALITY, QUALITY), "signal edge.quality of assistant twice"),
        (
            with_signals(msgspec.structs.replace(QUALITY, model_sha256="a" * 64)),
            "assistant: its signal edge.quality was fitted on the weights aaaaaaaaaaaa, but",
        ),
        (with_signals(msgspec.structs.replace(QUALITY, kind="scope")), r"signals\[0\]\.kind"),
        (with_signals(QUALITY, number=1), "`format` must be 2 for this content, not 1"),
        (msgspec.structs.replace(MANIFEST, leaving="report"), "`format` must be 2"),
        (msgspec.structs.replace(MANIFEST, format=2), "`format` must be 1 for this content, not 2"),
    ],
)
def test_signals_and_formats_that_cannot_be_are_refused(manifest: BundleManifest, words: str) -> None:
    with pytest.raises(BundleInvalid, match=words):
        read(encode_canonical(manifest))


def test_a_device_without_a_word_about_requests_that_leave_refuses_them() -> None:
    assert read(encode_canonical(MANIFEST)).leaving == "refuse"
    told = msgspec.structs.replace(MANIFEST, leaving="report", format=2)
    assert read(encode_canonical(told)) == told


def test_blobs_are_listed_once() -> None:
    twice = msgspec.structs.replace(MANIFEST, cases=(MANIFEST.cases[0], MANIFEST.cases[0]))
    assert twice.blobs == (MANIFEST.policy, MANIFEST.cases[0], MANIFEST.models[0].blob)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "truncated"),
        (b"[1]", "object"),
        (b'{"format":1,"min_daemon":"0.1.0"}', "missing required field `cohort`"),
        (altered(b'"serial":7', b'"serial": 7'), "not in canonical form"),
        (altered(b'"serial":7', b'"serial":0'), "serial"),
        (altered(b'"serial":7', b'"serial":7,"extra":1'), "unknown field `extra`"),
        (altered(b'"kiosk"', b'"../kiosk"'), "cohort"),
        (altered(b'"log"', b'"server.host"'), "`settings.server.host`: not a key that a fleet may set"),
        (altered(b'"log"', b'"cloud.url"'), "`settings.cloud.url`: not a key that a fleet may set"),
        (altered(b'"engine.threads":4', b'"engine.threads":-4'), "settings.engine.threads"),
        (altered(b'"cloud.timeout_s":30.0', b'"cloud.timeout_s":30'), "`settings.cloud.timeout_s` must be written"),
        (b'{"format":1,"min_daemon":"0.1.0","x":"' + b" " * MAX_MANIFEST_BYTES + b'"}', "larger than"),
    ],
)
def test_a_malformed_manifest_is_refused_by_name(content: bytes, words: str) -> None:
    with pytest.raises(BundleInvalid, match=words.replace(".", r"\.")):
        read(content)


def test_another_content_than_the_signed_one_is_refused() -> None:
    with pytest.raises(BundleAltered):
        read_manifest(altered(b'"serial":7', b'"serial":8'), bundle_id(MANIFEST), "0.1.0")


def test_a_doubled_model_is_refused() -> None:
    doubled = msgspec.structs.replace(MANIFEST, models=MANIFEST.models * 2)
    with pytest.raises(BundleInvalid, match="assistant twice"):
        read(encode_canonical(doubled))


def test_a_bundle_of_a_later_release_says_what_it_needs() -> None:
    """Even if an older daemon cannot read its fields."""
    later = altered(b'"format":1', b'"format":3').replace(b'"serial":7', b'"grown":true').replace(b"0.1.0", b"2.0.0")
    with pytest.raises(DaemonTooOld, match=r"needs a daemon 2\.0\.0 or newer, but this is 0\.1\.0"):
        read(later)
    with pytest.raises(DaemonTooOld, match="format 3"):
        read(altered(b'"format":1', b'"format":3'))


@pytest.mark.parametrize(
    ("daemon", "least", "enough"),
    [
        ("1.2.3", "1.2.3", True),
        ("1.10.0", "1.9.9", True),
        ("1.2.3.post1", "1.2.3", True),
        ("1.2.3+g0abc", "1.2.3", True),
        ("1.2.3rc1", "1.2.3", False),
        ("1.3.0.dev2", "1.3.0", False),
        ("1.3.0.dev2", "1.2.9", True),
        ("unknown", "0.0.0", False),
    ],
)
def test_versions_are_compared_as_pep_440_has_them(daemon: str, least: str, enough: bool) -> None:
    assert daemon_is_new_enough(daemon, least) is enough


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_in_our_words(content: bytes) -> None:
    with pytest.raises(UpdateRefused):
        read(content)
