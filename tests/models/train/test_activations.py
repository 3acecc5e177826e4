"""The importance matrix of a GGUF, measured through llama.cpp."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("llama_cpp")

from causeway_server.models.catalog.artifact import ArtifactError
from causeway_train.cli.commands import main
from causeway_train.export.activations import importance_of
from tests.models.llama_cpp.tiny_gguf import write_tiny_gguf

TEXTS = ("turn on the light", "what is the weather tomorrow", "")


def test_the_output_matrix_reads_normalised_inputs(tmp_path: Path) -> None:
    """RMSNorm with weights of 1: the squares of a row have the mean 1. Matrices with the same input agree."""
    found = importance_of(write_tiny_gguf(tmp_path / "tiny.gguf"), TEXTS, threads=1)
    assert {len(values) for values in found.values()} == {64, 128}
    assert found["blk.0.attn_q.weight"].mean() == pytest.approx(1, abs=0.01)
    assert np.array_equal(found["blk.1.ffn_gate.weight"], found["blk.1.ffn_up.weight"])
    assert found["blk.0.attn_output.weight"].mean() != pytest.approx(1, abs=0.01)
    with pytest.raises(ArtifactError, match="cannot load the file"):
        importance_of(Path(__file__), TEXTS)


def test_the_matrix_is_what_quantize_reads(tmp_path: Path) -> None:
    source, prompts, matrix = tmp_path / "tiny.gguf", tmp_path / "prompts.jsonl", tmp_path / "matrix.npz"
    write_tiny_gguf(source, width=256, hidden=256, heads=4)
    prompts.write_bytes(b'{"prompt": "turn on the light"}')
    runner = CliRunner()
    made = runner.invoke(main, ["importance-gguf", str(source), str(matrix), "--prompts", str(prompts)])
    assert made.exit_code == 0, made.output
    quantised = []
    for options in ([], ["--importance", str(matrix)]):
        target = tmp_path / f"{len(options)}.gguf"
        assert runner.invoke(main, ["quantize", str(source), str(target), "--to", "Q4_K_M", *options]).exit_code == 0
        quantised.append(target.read_bytes())
    assert quantised[0] != quantised[1]
    again = runner.invoke(main, ["quantize", str(tmp_path / "0.gguf"), str(tmp_path / "again.gguf"), "--to", "Q8_0"])
    assert again.exit_code == 0, again.output
