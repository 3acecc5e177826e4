"""Bundles with a projector: tried before the box changes, counted into its memory, shared and removed as all files."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from models.catalog.artifact import find_artifact, sha256_of
from models.catalog.projector import find_projector
from models.llama_cpp.protocol import adapter_files
from models.publish.publish import publish_gguf
from router.bundle.protocol import BoxState

from ..engine.tiny_adapter import write_tiny_adapter
from ..engine.tiny_gguf import write_tiny_gguf
from ..engine.tiny_mmproj import LANGUAGE, MARKS, Family, needs_mtmd, write_tiny_mmproj
from ..modalities.test_decoding import needs_pillow
from ..modalities.tiny_projector import ENCODER, add_projector
from .fleet import Publisher, TestBox

pytestmark = [pytest.mark.slow, pytest.mark.engine]
FAMILY: Family = "gemma3"
MODEL = "    models:\n      m-small: {{file: model.gguf, projector: {{{}}}}}\n"


def write_vision_model(folder: Path, *, dimensions: int = 64) -> str:
    """Write a tiny vision model; return the `extra` of a bundle with it."""
    write_tiny_gguf(folder / "model.gguf", architecture=LANGUAGE[FAMILY], marks=MARKS[FAMILY], window=512)
    write_tiny_mmproj(folder / "mmproj.gguf", FAMILY, dimensions=dimensions)
    return MODEL.format("file: mmproj.gguf")


def write_panel_model(folder: Path) -> str:
    """Write a tiny model with a projector and its encoder; return the keys of the projector without `tokens`."""
    gguf = write_tiny_gguf(folder / "model.gguf")
    model = publish_gguf(gguf, "m-small", folder / "local")
    add_projector(model, np.zeros((3, 64), np.float32), np.ones((3, 64), np.float32))
    shutil.copy(model.folder / "projector.onnx", folder)
    shutil.copy(model.folder.parent / ENCODER / "model.onnx", folder / "encoder.onnx")
    return f"file: projector.onnx, encoder: {{file: encoder.onnx}}, model_sha256: {sha256_of(gguf)}"


@needs_mtmd
@needs_pillow
async def test_a_bundle_brings_an_mmproj_file(publisher: Publisher, box: TestBox) -> None:
    """The model finds it as a file of the store, which stays while a kept bundle needs it."""
    bundle = publisher.release(extra=write_vision_model(publisher.path))
    await box.change()
    dirs = [box.booted.store.load(bundle).models]
    found = find_projector("m-small", dirs)
    assert found is not None
    blobs = box.folder / "store" / "blobs"
    assert {found.path.parent, found.model.parent} == {blobs}
    assert (found.path.name, found.encoder) == (sha256_of(publisher.path / "mmproj.gguf"), None)
    for kept in (True, False):
        publisher.release()
        await box.change()
        assert found.path.exists() is kept


@needs_mtmd
@needs_pillow
async def test_an_mmproj_file_of_another_model_is_never_used(publisher: Publisher, box: TestBox) -> None:
    bundle = publisher.release(extra=write_vision_model(publisher.path, dimensions=32))
    await box.until(BoxState.IDLE)
    assert box.agent.row.quarantined[bundle].startswith("model_unusable: the projector of m-small: ")
    assert box.host.used == []


@needs_mtmd
async def test_the_process_of_a_projector_is_counted_into_the_memory(publisher: Publisher, box: TestBox) -> None:
    """On this box the model alone would fit."""
    box.host.memory_bytes = 300 << 20
    bundle = publisher.release(extra=write_vision_model(publisher.path))
    await box.until(BoxState.IDLE)
    reason = box.agent.row.quarantined[bundle]
    assert (reason.startswith("model_too_large: m-small with "), "for its projector" in reason) == (True, True)
    bundle = publisher.release(extra="    models: {m-small: {file: model.gguf}}\n")
    await box.until(BoxState.TRIAL)


@needs_pillow
async def test_a_bundle_brings_a_projector_with_its_encoder(publisher: Publisher, box: TestBox) -> None:
    """One that gives another number of tokens than the bundle says is refused before anything changes."""
    keys = write_panel_model(publisher.path)
    wrong = publisher.release(extra=MODEL.format(f"{keys}, tokens: 4"))
    await box.until(BoxState.IDLE)
    assert "192 values for a picture; the model takes 4 tokens of 64" in box.agent.row.quarantined[wrong]
    right = publisher.release(extra=MODEL.format(f"{keys}, tokens: 3"))
    await box.change()
    found = find_projector("m-small", [box.booted.store.load(right).models])
    assert found is not None
    assert found.encoder is not None
    assert (found.tokens, found.encoder.name) == (3, sha256_of(publisher.path / "encoder.onnx"))
    encoder = box.booted.store.load(right).models / "m-small" / "encoder.onnx"
    encoder.unlink()
    shutil.copy(publisher.path / "projector.onnx", encoder)
    box.start()
    assert box.agent.running is None


async def test_an_engine_loads_adapters_again_after_their_bundle_is_gone(publisher: Publisher, box: TestBox) -> None:
    """Bundles that keep the model keep its engine too, which opens its files anew after a crash or an unload."""
    write_tiny_gguf(publisher.path / "model.gguf")
    write_tiny_adapter(publisher.path / "night.gguf")
    extra = "    models:\n      m-small: {file: model.gguf, adapters: {night: {file: night.gguf}}}\n"
    first = publisher.release(extra=extra)
    await box.change()
    (adapter,) = adapter_files(find_artifact("m-small", [box.booted.store.load(first).models]))
    for _ in range(2):
        publisher.release(extra=extra)
        await box.change()
    assert not (box.folder / "bundles" / first).exists()
    assert sha256_of(Path(adapter.path)) == sha256_of(publisher.path / "night.gguf")
