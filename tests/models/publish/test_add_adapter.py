"""`causeway-models add-adapter`: a file that is no adapter of the model is refused, and the model stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("llama_cpp")

from causeway_server.models.catalog.artifact import Artifact, ArtifactError, load_artifact, verify_artifact
from causeway_server.models.cli.commands import main
from causeway_server.models.publish.publish import publish_gguf
from tests.models.llama_cpp.tiny_adapter import write_tiny_adapter
from tests.models.llama_cpp.tiny_gguf import write_tiny_gguf

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture
def model(tmp_path: Path) -> Artifact:
    return publish_gguf(write_tiny_gguf(tmp_path / "model.gguf"), "tiny", tmp_path / "models")


def add(model: Artifact, file: Path, *options: object, name: str = "tiny") -> Result:
    arguments = ["add-adapter", name, str(file), "--models", str(model.folder.parent), *map(str, options)]
    return CliRunner().invoke(main, arguments)


def test_an_added_adapter_is_listed_verified_and_replaced(tmp_path: Path, model: Artifact) -> None:
    file = write_tiny_adapter(tmp_path / "Kiosk one.gguf", 1)
    added = add(model, file, "--scale", 0.5)
    assert added.exit_code == 0, added.output
    assert "added tiny+kiosk-one" in added.output
    entry = load_artifact(model.folder).manifest.adapters["kiosk-one"]
    assert (entry.file, entry.scale, entry.size_bytes) == ("adapter-kiosk-one.gguf", 0.5, file.stat().st_size)
    listed = CliRunner().invoke(main, ["list", "--models", str(model.folder.parent)])
    assert "tiny+kiosk-one" in listed.output
    again = add(model, file)
    assert again.exit_code == 1
    assert "--replace" in again.output
    assert add(model, write_tiny_adapter(file, 2), "--replace").exit_code == 0
    verify_artifact(load_artifact(model.folder))
    (model.folder / "adapter-kiosk-one.gguf").write_bytes(b"GGUF")
    with pytest.raises(ArtifactError, match="adapter-kiosk-one"):
        verify_artifact(load_artifact(model.folder))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: write_tiny_adapter(path, architecture="qwen2"), "an adapter for qwen2 models"),
        (lambda path: write_tiny_adapter(path, kind="control_vector"), "not a LoRA adapter but control_vector"),
        (lambda path: write_tiny_adapter(path, name="blk.9.attn_q.weight"), "cannot load the file as an adapter"),
        (lambda path: write_tiny_adapter(path, name="blk.0.ffn_down.weight"), "cannot load the file as an adapter"),
        (lambda path: write_tiny_adapter(path, rank_of_b=2), "cannot load the file as an adapter"),
        (write_tiny_gguf, "not a LoRA adapter but a model"),
        (lambda path: path.write_bytes(write_tiny_adapter(path).read_bytes()[:-700]) and path, "refused|cannot|ends"),
        (lambda path: path.write_bytes(b"GGUF garbage") and path, "GGUF|version"),
    ],
    ids=["architecture", "kind", "tensor", "shape", "rank", "model", "cut", "garbage"],
)
def test_what_is_no_adapter_of_the_model_is_refused(
    tmp_path: Path, model: Artifact, make: Callable[[Path], Path], words: str
) -> None:
    refused = add(model, make(tmp_path / "file.gguf"))
    assert refused.exit_code == 1, refused.output
    assert any(word in refused.output.replace("\n", " ") for word in words.split("|")), refused.output
    assert refused.output.startswith("Error: ")
    assert load_artifact(model.folder) == model
    assert sorted(path.name for path in model.folder.iterdir()) == ["manifest.json", "model.gguf"]


@pytest.mark.parametrize(
    ("model_name", "options", "words"),
    [
        ("tiny", ("--name", "No Good"), "not a valid name"),
        ("tiny", ("--name", "a+b"), "not a valid name"),
        ("tiny", ("--scale", 0), "the scale 0"),
        ("tiny", ("--scale", "nan"), "the scale nan"),
        ("assistant", (), "ships with Causeway"),
        ("edge-quality", (), "not a language model"),
        ("nothing", (), "no model named"),
    ],
)
def test_a_model_or_name_that_cannot_be_is_refused_before_the_file_is_read(
    tmp_path: Path, model: Artifact, model_name: str, options: tuple[object, ...], words: str
) -> None:
    file = tmp_path / "file.gguf"
    file.write_bytes(b"")
    refused = add(model, file, *options, name=model_name)
    assert refused.exit_code == 1
    assert words in refused.output
