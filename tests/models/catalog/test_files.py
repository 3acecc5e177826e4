"""Reading GGUF files, adding an owner's models, memory estimates, quantisation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp")

from causeway_server.models.catalog.artifact import ArtifactError, find_artifact, verify_artifact
from causeway_server.models.catalog.fit import DEVICES, Device, estimate_memory, largest_batch
from causeway_server.models.catalog.gguf import read_gguf
from causeway_server.models.publish.add import AddResult, add_model
from causeway_train.export.quantize import quantize

ROOMY = Device("roomy", 64 * 2**30)
SHIPPED = find_artifact("assistant").path


def add(file: Path, root: Path, name: str | None = None, device: Device = ROOMY, force: bool = False) -> AddResult:
    return add_model(file, root, name=name, device=device, context=512, batch=2, force=force)


@pytest.mark.slow
def test_an_owners_gguf_becomes_usable_by_name(tmp_path: Path) -> None:
    """It is copied, described from its metadata and verified; the original stays."""
    mine = tmp_path / "My Model.Q4_0.gguf"
    mine.write_bytes(SHIPPED.read_bytes())
    added = add(mine, tmp_path / "models")
    assert added.artifact.name == "my-model.q4_0"
    verify_artifact(find_artifact("my-model.q4_0", (tmp_path / "models",)))
    assert added.artifact.manifest.context_length == 2048
    assert mine.is_file()


@pytest.mark.slow
def test_a_truncated_gguf_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(SHIPPED.read_bytes()[:5000])
    with pytest.raises(ArtifactError, match=r"broken\.gguf"):
        add(broken, tmp_path / "models")
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize(
    ("name", "content"), [("x.gguf", b"PK\x03\x04 a zip"), ("x.pt", b"\x80\x04 pickle"), ("x.onnx", b"junk")]
)
def test_other_files_are_refused(tmp_path: Path, name: str, content: bytes) -> None:
    pytest.importorskip("onnxruntime")
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(ArtifactError):
        add(file, tmp_path / "models")
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize("name", ["../up", "A B", "", "x" * 65, "/etc"])
def test_names_that_cannot_be_policy_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ArtifactError, match="not a valid model name"):
        add(SHIPPED, tmp_path, name=name or "-")


def test_a_taken_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="a model named 'assistant' exists already"):
        add(SHIPPED, tmp_path, name="assistant")


@pytest.mark.slow
def test_a_model_that_does_not_fit_needs_force(tmp_path: Path) -> None:
    """The error names both sizes; with force it is added with a note."""
    tight = Device("tight", 2**20)
    with pytest.raises(ArtifactError, match=r"tight has 1 MiB|tight has 0 MiB"):
        add(SHIPPED, tmp_path, name="mine", device=tight)
    added = add(SHIPPED, tmp_path, name="mine", device=tight, force=True)
    assert any("tight" in note for note in added.notes)


def test_memory_grows_with_context_and_batch() -> None:
    """layers · heads · (key + value width) · 2 bytes per token: exact for the shipped model."""
    model = read_gguf(SHIPPED)
    one = estimate_memory(model, context=1024, batch=1)
    four = estimate_memory(model, context=1024, batch=4)
    assert one.cache_bytes == model.layers * model.width * 2 * 2 * 1024
    assert four.cache_bytes == 4 * one.cache_bytes
    assert four.weights_bytes == one.weights_bytes == model.tensors_bytes
    assert largest_batch(model, Device("tiny", one.total_bytes, 1.0), 1024) == 1
    assert largest_batch(model, Device("none", 2**20), 1024) == 0
    assert {"orin-nano-8gb", "orin-nx-16gb", "agx-orin-64gb", "this-machine"} == set(DEVICES)


MEASURE = """
import sys, psutil
from pathlib import Path
from causeway_train.evaluate.greedy import GreedyModel
with GreedyModel(Path(sys.argv[1]), slots=8, context=16384, threads=1) as model:
    model.logits(model.tokenize("turn on the light " * 100)[:400])
    print(psutil.Process().memory_info().rss)
"""


@pytest.mark.slow
def test_the_estimate_is_near_a_process_s_resident_memory() -> None:
    """Eight sequences of 2048 tokens: at most 10 % above the estimate, at least half of it."""
    result = subprocess.run([sys.executable, "-c", MEASURE, str(SHIPPED)], capture_output=True, text=True, check=True)
    need = estimate_memory(read_gguf(SHIPPED), context=2048, batch=8).total_bytes
    assert 0.5 * need < int(result.stdout) < 1.1 * need


def test_quantising_to_an_unknown_kind_or_from_junk_is_an_error(tmp_path: Path) -> None:
    """No output is left that looks like a GGUF."""
    with pytest.raises(ArtifactError, match="Q4_0"):
        quantize(SHIPPED, tmp_path / "out.gguf", "Q3_X")
    junk = tmp_path / "junk.gguf"
    junk.write_bytes(b"junk")
    with pytest.raises(ArtifactError, match="failed to quantise"):
        quantize(junk, tmp_path / "out.gguf", "Q8_0")
