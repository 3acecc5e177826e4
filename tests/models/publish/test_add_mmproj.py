"""`causeway-models add --mmproj` and `add-mmproj`: a file that is not for the model is refused, and nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("llama_cpp")

from causeway_server.models.catalog import projector
from causeway_server.models.catalog.artifact import Artifact, ArtifactError, load_artifact, verify_artifact
from causeway_server.models.catalog.projector import find_projector
from causeway_server.models.cli.commands import main
from causeway_server.models.publish.publish import publish_gguf
from tests.models.llama_cpp.tiny_adapter import write_tiny_adapter
from tests.models.llama_cpp.tiny_gguf import write_tiny_gguf
from tests.models.llama_cpp.tiny_mmproj import needs_mtmd, write_tiny_mmproj

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture
def model(tmp_path: Path) -> Artifact:
    return publish_gguf(write_tiny_gguf(tmp_path / "model.gguf"), "tiny", tmp_path / "models")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)])


def add(model: Artifact, file: Path) -> Result:
    return run("add-mmproj", model.name, file, "--models", model.folder.parent)


@needs_mtmd
def test_a_vision_model_is_added_listed_verified_and_counted(tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "vision.gguf")
    mmproj = write_tiny_mmproj(tmp_path / "mmproj-vision.gguf")
    root = tmp_path / "models"
    told = run("add", file, "--to", root, "--name", "blind")
    assert "mmproj-vision.gguf is in the same folder" in told.output
    added = run("add", file, "--to", root, "--name", "seeing", "--mmproj", mmproj)
    assert added.exit_code == 0, added.output
    artifact = load_artifact(root / "seeing")
    entry = artifact.manifest.projector
    assert entry is not None
    assert (entry.file, entry.note) == ("mmproj.gguf", "mlp, added from mmproj-vision.gguf")
    assert "seeing: images" in run("list", "--models", root).output
    assert "in a separate process" in run("fit", "seeing", "--models", root).output
    found = find_projector("seeing", [root])
    assert found is not None
    assert found.model == artifact.path
    verify_artifact(artifact)
    (artifact.folder / "mmproj.gguf").write_bytes(b"GGUF")
    with pytest.raises(ArtifactError, match=r"mmproj\.gguf"):
        verify_artifact(artifact)
    with pytest.raises(ArtifactError, match=r"mmproj\.gguf"):
        find_projector("seeing", [root])
    assert run("add-mmproj", "seeing", mmproj, "--models", root).exit_code == 0
    assert find_projector("seeing", [root]) == found


def cut(path: Path) -> Path:
    path.write_bytes(write_tiny_mmproj(path).read_bytes()[:-700])
    return path


def garbage(path: Path) -> Path:
    path.write_bytes(b"GGUF garbage")
    return path


def changed(path: Path, before: bytes, after: bytes) -> Path:
    content = write_tiny_mmproj(path).read_bytes()
    assert before in content
    path.write_bytes(content.replace(before, after))
    return path


@needs_mtmd
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: write_tiny_mmproj(path, dimensions=96), "n_embd = 96"),
        (write_tiny_gguf, "not an mmproj file"),
        (write_tiny_adapter, "not an mmproj file"),
        (cut, "truncated"),
        (garbage, "GGUF|version"),
        (lambda path: changed(path, b"mlp", b"abc"), "unknown projector"),
        (lambda path: changed(path, b"v.blk.1.ffn_up.weight", b"v.blk.1.ffn_up.weighs"), "unable to find tensor"),
        (
            lambda path: changed(path, b"clip.has_vision_encoder", b"clip.has_nothing_inside"),
            "without an image encoder",
        ),
        (
            lambda path: changed(path, b"clip.vision.patch_size\x04\0\0\0\x0e", b"clip.vision.patch_size\x04\0\0\0\0"),
            "",
        ),
        (lambda path: changed(path, b"image_size\x04\0\0\0\x38\0", b"image_size\x04\0\0\0\xff\xff"), ""),
        (lambda path: changed(path, b"attention.head_count\x04\0\0\0\x02", b"attention.head_count\x04\0\0\0\0"), ""),
    ],
    ids=["width", "model", "adapter", "cut", "garbage", "kind", "tensor", "blind", "patch", "side", "heads"],
)
def test_what_is_no_mmproj_file_of_the_model_is_refused(
    tmp_path: Path, model: Artifact, make: Callable[[Path], Path], words: str
) -> None:
    """In a child: some of these crash llama.cpp."""
    refused = add(model, make(tmp_path / "file.gguf"))
    assert refused.exit_code == 1, refused.output
    assert refused.output.startswith("Error: ")
    assert any(word in refused.output.replace("\n", " ") for word in words.split("|")), refused.output
    assert load_artifact(model.folder) == model
    assert sorted(path.name for path in model.folder.iterdir()) == ["manifest.json", "model.gguf"]


def test_without_mtmd_it_is_refused_plainly(tmp_path: Path, model: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projector, "has_mtmd", lambda: False)
    refused = add(model, write_tiny_mmproj(tmp_path / "file.gguf"))
    assert (refused.exit_code, "lacks mtmd" in refused.output) == (1, True)
    assert load_artifact(model.folder) == model


def test_an_onnx_file_takes_none(tmp_path: Path, model: Artifact) -> None:
    (tmp_path / "vision.onnx").write_bytes(b"\x08\x09")
    mmproj = write_tiny_mmproj(tmp_path / "file.gguf")
    refused = run("add", tmp_path / "vision.onnx", "--to", model.folder.parent, "--mmproj", mmproj)
    assert (refused.exit_code, "belongs to a language model" in refused.output.replace("\n", " ")) == (1, True)
    assert [*model.folder.parent.iterdir()] == [model.folder]
