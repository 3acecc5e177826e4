"""Artifacts: manifests, finding them by name, and detecting altered weights."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from causeway_server.models.catalog.artifact import (
    MANIFEST,
    Artifact,
    ArtifactCorrupt,
    ArtifactError,
    ArtifactNotFound,
    DataSource,
    Manifest,
    find_artifact,
    list_artifacts,
    load_artifact,
    save_manifest,
    sha256_of,
    verify_artifact,
)


def make(root: Path, name: str = "tiny", weights: bytes = b"GGUF weights") -> Artifact:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "model.gguf").write_bytes(weights)
    manifest = Manifest(
        name=name,
        file="model.gguf",
        sha256=sha256_of(folder / "model.gguf"),
        size_bytes=len(weights),
        format="gguf",
        architecture="llama",
        quantisation="Q4_0",
        context_length=2048,
        licence="Apache-2.0",
        data=(DataSource("HWU64", "CC BY 4.0", "Liu et al. 2019"),),
        metrics={"snips2017/exact": 0.5},
    )
    return save_manifest(manifest, folder)


def test_a_manifest_reads_back_as_it_was_written(tmp_path: Path) -> None:
    saved = make(tmp_path)
    assert load_artifact(tmp_path / "tiny") == saved
    verify_artifact(saved)


def test_an_adapter_added_before_adapters_had_a_form_of_answers_keeps_the_version(tmp_path: Path) -> None:
    """Its answers are in the model's form, and the evidence and cached answers of the version stay valid."""
    artifact = make(tmp_path)
    path = artifact.folder / MANIFEST
    stored = msgspec.json.decode(path.read_bytes())
    adapter = {"file": "adapter-kiosk.gguf", "sha256": "a" * 64, "size_bytes": 5}
    path.write_bytes(msgspec.json.encode(stored | {"adapters": {"kiosk": adapter}}))
    assert load_artifact(artifact.folder).version == f"{artifact.manifest.sha256} kiosk {'a' * 64} 1"
    path.write_bytes(msgspec.json.encode(stored | {"adapters": {"kiosk": adapter | {"answers": "calls"}}}))
    assert load_artifact(artifact.folder).version == f"{artifact.manifest.sha256} kiosk {'a' * 64} 1 calls"


def test_one_flipped_bit_fails_verification(tmp_path: Path) -> None:
    artifact = make(tmp_path)
    raw = bytearray(artifact.path.read_bytes())
    raw[5] ^= 1
    artifact.path.write_bytes(raw)
    with pytest.raises(ArtifactCorrupt, match="sha256"):
        verify_artifact(artifact)


def test_truncated_and_missing_weights_are_different_errors(tmp_path: Path) -> None:
    artifact = make(tmp_path)
    artifact.path.write_bytes(b"GGUF")
    with pytest.raises(ArtifactCorrupt, match="4 bytes, but the manifest says 12"):
        verify_artifact(artifact)
    artifact.path.unlink()
    with pytest.raises(ArtifactNotFound):
        verify_artifact(artifact)
    with pytest.raises(ArtifactNotFound, match="but the file does not exist"):
        find_artifact("tiny", (tmp_path,))


def test_an_unknown_name_is_an_error_that_lists_the_known_ones(tmp_path: Path) -> None:
    make(tmp_path, "mine")
    with pytest.raises(ArtifactNotFound, match="no model named 'yours'") as error:
        find_artifact("yours", (tmp_path,))
    assert "mine" in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_an_owners_model_hides_a_shipped_one_of_the_same_name(tmp_path: Path) -> None:
    mine = make(tmp_path, "assistant")
    assert find_artifact("assistant", (tmp_path,)) == mine
    names = [artifact.name for artifact in list_artifacts((tmp_path,))]
    assert names == sorted(set(names))


def test_a_folder_that_does_not_exist_holds_nothing(tmp_path: Path) -> None:
    """An owner may have added no model yet."""
    assert list_artifacts((tmp_path / "none",)) == list_artifacts()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"file": "../../etc/passwd"}, "same folder"),
        ({"surprise": 1}, "unknown field"),
        ({"size_bytes": "many"}, "size_bytes"),
    ],
)
def test_a_bad_manifest_is_refused_with_its_path(tmp_path: Path, change: dict[str, object], message: str) -> None:
    artifact = make(tmp_path)
    content = msgspec.json.decode((artifact.folder / "manifest.json").read_bytes()) | change
    (artifact.folder / "manifest.json").write_bytes(msgspec.json.encode(content))
    with pytest.raises(ArtifactError, match=message) as error:
        load_artifact(artifact.folder)
    assert "manifest.json" in str(error.value)
