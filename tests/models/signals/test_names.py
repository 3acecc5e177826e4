"""Names and addresses by a real ONNX graph and a real tokenizer, made small enough to know every answer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from causeway_server.models.signals.names import NamesModel, load_names_model
from causeway_server.router.errors import ConfigError

WORDS = {"[UNK]": 0, "Anna": 1, "Meyer": 2, "Main": 3, "Street": 4}
LABELS = {"0": "O", "1": "B-PER", "2": "I-PER", "3": "B-LOC", "4": "I-LOC"}


def model_in(folder: Path, labels: dict[str, str] = LABELS) -> Path:
    """Write a model whose label of each known word is its own, as the exporter lays one out."""
    tokenizer = Tokenizer(WordLevel(WORDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"id2label": labels, "model_type": "bert"}))
    table = numpy_helper.from_array(np.eye(len(WORDS), dtype=np.float32), "table")
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "input_ids"], ["logits"])],
        "names",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "length"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "length", len(WORDS)])],
        [table],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(made, str(folder / "model.onnx"))
    return folder


def test_neighbouring_tokens_of_a_class_are_one_value(tmp_path: Path) -> None:
    model = NamesModel(model_in(tmp_path))
    text = "here is Anna Meyer of Main Street, not Anna"
    assert [(one.kind, text[one.start : one.end]) for one in model.find(text)] == [
        ("name", "Anna Meyer"),
        ("address", "Main Street"),
        ("name", "Anna"),
    ]
    assert model.find("") == []


def test_a_long_text_is_read_to_its_end(tmp_path: Path) -> None:
    """In windows that share tokens, so that no border cuts a name."""
    model = NamesModel(model_in(tmp_path))
    text = "and " * 383 + "Anna Meyer " + "and " * 1000 + "Meyer"
    assert [text[one.start : one.end] for one in model.find(text)] == ["Anna Meyer", "Meyer"]


def test_without_a_folder_there_is_no_model() -> None:
    assert load_names_model("") is None


@pytest.mark.parametrize("fault", ["missing", "no labels", "no graph"])
def test_a_folder_that_is_not_a_model_is_refused_by_its_key(tmp_path: Path, fault: str) -> None:
    folder = tmp_path / "model"
    if fault != "missing":
        folder.mkdir()
        model_in(folder, {"0": "O", "1": "B-DRUG"} if fault == "no labels" else LABELS)
    if fault == "no graph":
        (folder / "model.onnx").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match=r"guard\.names_model: .*cannot be loaded"):
        load_names_model(str(folder))
