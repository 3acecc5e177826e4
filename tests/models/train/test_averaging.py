"""Averaging the weights of two related networks, and refusing pairs that are not related."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest

from causeway_server.models.catalog.artifact import SHIPPED, ArtifactError
from causeway_server.models.catalog.gguf import read_gguf
from causeway_train.export.averaging import average

WORDS = ["a", "b", "c", "d"]


def write(
    path: Path, value: float, *, name: str = "m", tokens: list[str] = WORDS, width: int = 4, kind: type = np.float32
) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(name)
    writer.add_chat_template("{{ messages }}")
    writer.add_token_list(tokens)
    writer.add_tensor("token_embd.weight", np.full((4, width), value, dtype=kind))
    writer.add_tensor("output_norm.weight", np.full(4, 10.0 * value, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_each_weight_is_the_weighted_mean_of_both(tmp_path: Path) -> None:
    """Weighted by the share; metadata is the second's, and neither input file changes."""
    first, second = write(tmp_path / "one.gguf", 1.0, name="one"), write(tmp_path / "two.gguf", 2.0, name="two")
    before = first.read_bytes(), second.read_bytes()
    average(first, second, tmp_path / "made.gguf", 0.25)
    weights = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "made.gguf").tensors}
    assert np.all(weights["token_embd.weight"] == 1.25)
    assert np.all(weights["output_norm.weight"] == 12.5)
    assert read_gguf(tmp_path / "made.gguf").name == "two"
    assert (first.read_bytes(), second.read_bytes()) == before


@pytest.mark.parametrize(
    ("write_other", "why"),
    [
        (partial(write, tokens=["a", "b", "c", "e"]), "not related.*tokenizer.ggml.tokens"),
        (partial(write, width=8), "not related.*token_embd.weight"),
        (partial(write, kind=np.float16), "F16.*only F32"),
    ],
)
def test_unrelated_networks_are_refused(tmp_path: Path, write_other: Callable[[Path, float], Path], why: str) -> None:
    """Another vocabulary, another shape, quantised weights: the error names which; no file is left behind."""
    first, second = write(tmp_path / "one.gguf", 1.0), write_other(tmp_path / "two.gguf", 2.0)
    with pytest.raises(ArtifactError, match=why):
        average(first, second, tmp_path / "made.gguf", 0.5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.gguf", "two.gguf"]


def test_junk_and_quantised_files_are_refused(tmp_path: Path) -> None:
    whole, junk = write(tmp_path / "one.gguf", 1.0), tmp_path / "junk.gguf"
    junk.write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(ArtifactError, match="not a readable GGUF"):
        average(whole, junk, tmp_path / "made.gguf", 0.5)
    shipped = SHIPPED / "assistant" / "model.gguf"
    with pytest.raises(ArtifactError, match="only F32"):
        average(shipped, shipped, tmp_path / "made.gguf", 0.5)
    assert not (tmp_path / "made.gguf").exists()
