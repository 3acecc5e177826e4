"""The files of an artifact on a disk that takes no more of them: the error says why, and nothing is left behind."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from causeway_server.models.catalog.artifact import ArtifactError
from causeway_server.models.publish.publish import PlaceMode, place

LIMIT_BYTES = 16 * 1024


@contextmanager
def full_disk() -> Iterator[None]:
    """A file takes no more than LIMIT_BYTES; what was written until then stays, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    file = tmp_path / "weights.gguf"
    file.write_bytes(bytes(2 * LIMIT_BYTES))
    return file


@pytest.mark.parametrize("mode", ["copy", "link", "move"])
def test_weights_are_copied_linked_or_moved(weights: Path, tmp_path: Path, mode: PlaceMode) -> None:
    inode = weights.stat().st_ino
    target = place(weights, tmp_path / "models" / "one" / "model.gguf", mode)
    assert target.stat().st_size == 2 * LIMIT_BYTES
    assert (target.stat().st_ino == inode, weights.exists()) == (mode != "copy", mode != "move")


def test_a_link_to_another_file_system_is_a_symbolic_one(tmp_path: Path) -> None:
    elsewhere = Path("/proc/version")
    target = place(elsewhere, tmp_path / "models" / "one" / "model.gguf", "link")
    assert target.readlink() == elsewhere


def test_a_copy_that_the_disk_cuts_short_is_removed(weights: Path, tmp_path: Path) -> None:
    """With the folder, if it is new; the files of one that was there stay."""
    old = tmp_path / "models" / "old" / "manifest.json"
    old.parent.mkdir(parents=True)
    old.write_text("{}")
    for name in ("new", "old"):
        with full_disk(), pytest.raises(ArtifactError, match=f"{name}: the weights cannot be written: File too large"):
            place(weights, tmp_path / "models" / name / "model.gguf", "copy")
    assert [*(tmp_path / "models").rglob("*")] == [old.parent, old]
    assert weights.stat().st_size == 2 * LIMIT_BYTES


def test_weights_larger_than_the_free_space_are_not_begun(weights: Path, tmp_path: Path) -> None:
    """The message has both figures."""
    with weights.open("r+b") as file:
        file.truncate(2 * shutil.disk_usage(tmp_path).free)  # sparse
    with pytest.raises(ArtifactError, match=r"new: [\d,]+ MiB are needed, but [\d,]+ MiB are free"):
        place(weights, tmp_path / "models" / "new" / "model.gguf", "copy")
    assert [*(tmp_path / "models").iterdir()] == []


@pytest.mark.parametrize("mode", ["copy", "link", "move"])
def test_a_folder_below_a_file_is_refused(weights: Path, tmp_path: Path, mode: PlaceMode) -> None:
    (tmp_path / "notes").write_text("not a folder")
    with pytest.raises(ArtifactError, match="one: the weights cannot be written: Not a directory"):
        place(weights, tmp_path / "notes" / "one" / "model.gguf", mode)
    assert weights.exists()
