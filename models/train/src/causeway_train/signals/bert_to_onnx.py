"""Conversion of all-MiniLM-L6-v2, or another BERT sentence encoder, from its published files to one ONNX graph.

    folder/model.safetensors   weights, F32 (huggingface/safetensors: a JSON header, then plain arrays)
    folder/config.json         sizes
    folder/vocab.txt           word pieces

The graph maps the ids of one text to its vector: the mean of the last layer over all tokens, normalised to length 1.
With `int8` the matrices are int8 (one scale per column) and multiplied as integers; activations are quantised
dynamically.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from causeway_server.models.catalog.artifact import ArtifactError
from causeway_server.models.signals.encoder import PIECES_KEY, SPECIAL_IDS_KEY

from ..onnx_writer import FLOAT, INT64, Attribute, Constant, Node, Port, write_onnx

Weights = Mapping[str, NDArray[np.float32]]
_KINDS = {"F32": np.float32, "F16": np.float16}


class BertConfig(msgspec.Struct, frozen=True):
    """The keys of `config.json` that are needed."""

    hidden_size: int
    num_attention_heads: int
    num_hidden_layers: int
    layer_norm_eps: float = 1e-12
    max_position_embeddings: int = 512


def convert(folder: Path, target: Path, *, int8: bool = False) -> None:
    """Write the ONNX file `target`.

    Raises:
        ArtifactError: the folder holds no BERT sentence encoder.
    """
    try:
        shape = msgspec.json.decode((folder / "config.json").read_bytes(), type=BertConfig)
        pieces = (folder / "vocab.txt").read_text(encoding="utf-8").rstrip("\n").split("\n")
        weights = read_safetensors(folder / "model.safetensors")
        graph = _Builder(weights, shape, int8)
        output = graph.build()
    except (OSError, KeyError, ValueError, msgspec.DecodeError) as error:
        raise ArtifactError(f"{folder} is not a BERT sentence encoder ({error})") from error
    write_onnx(
        target,
        "sentence_transformer",
        graph.nodes,
        inputs=[Port("ids", INT64, ["n"])],
        outputs=[Port(output, FLOAT, [shape.hidden_size])],
        constants=graph.constants,
        metadata={PIECES_KEY: "\n".join(pieces), SPECIAL_IDS_KEY: f"{pieces.index('[CLS]')} {pieces.index('[SEP]')}"},
    )


def read_safetensors(path: Path) -> Weights:
    """Return every floating-point tensor of the file, as float32."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    tensors = {}
    for name, entry in json.loads(raw[8:start]).items():
        if name == "__metadata__" or entry["dtype"] not in _KINDS:
            continue
        first, last = entry["data_offsets"]
        values = np.frombuffer(raw[start + first : start + last], dtype=_KINDS[entry["dtype"]])
        tensors[name.removeprefix("bert.")] = values.reshape(entry["shape"]).astype(np.float32)
    return tensors


class _Builder:
    """Builds the graph; each method returns the name of its output."""

    def __init__(self, weights: Weights, shape: BertConfig, int8: bool) -> None:
        self._weights, self._shape, self._int8 = weights, shape, int8
        self.nodes: list[Node] = []
        self.constants: dict[str, Constant] = {}
        self._count = 0

    def build(self) -> str:
        shape, heads = self._shape, self._shape.num_attention_heads
        width = shape.hidden_size // heads
        split_shape, merged_shape = self.constant([-1, heads, width]), self.constant([-1, shape.hidden_size])
        scale = self.constant(np.array(1 / math.sqrt(width), np.float32))
        x = self._embed()
        for layer in range(shape.num_hidden_layers):
            prefix = f"encoder.layer.{layer}."
            query, key, value = (
                self.op("Reshape", self.linear(x, f"{prefix}attention.self.{part}"), split_shape)
                for part in ("query", "key", "value")
            )
            left = self.op("Transpose", self.op("Mul", query, scale), perm=[1, 0, 2])  # heads, n, width
            right = self.op("Transpose", key, perm=[1, 2, 0])
            attention = self.op("Softmax", self.op("MatMul", left, right), axis=-1)
            mixed = self.op("MatMul", attention, self.op("Transpose", value, perm=[1, 0, 2]))
            joined = self.op("Reshape", self.op("Transpose", mixed, perm=[1, 0, 2]), merged_shape)
            x = self.norm(
                self.op("Add", x, self.linear(joined, f"{prefix}attention.output.dense")), f"{prefix}attention.output"
            )
            hidden = self.op("Gelu", self.linear(x, f"{prefix}intermediate.dense"))
            x = self.norm(self.op("Add", x, self.linear(hidden, f"{prefix}output.dense")), f"{prefix}output")
        mean = self.op("ReduceMean", x, self.constant([0]), keepdims=0)
        return self.op("LpNormalization", mean, axis=-1, p=2)

    def _embed(self) -> str:
        words = self._weights["embeddings.word_embeddings.weight"]
        positions = self._weights["embeddings.position_embeddings.weight"]
        kinds = self._weights["embeddings.token_type_embeddings.weight"]
        length = self.op("Shape", "ids")
        near = self.op("Slice", self.constant(positions + kinds[0]), self.constant([0]), length, self.constant([0]))
        if self._int8:
            scale = np.abs(words).max(axis=1, keepdims=True) / 127 + 1e-12
            rows = self.op("Gather", self.constant(np.round(words / scale).astype(np.int8)), "ids")
            scales = self.op("Gather", self.constant(scale.astype(np.float32)), "ids")
            token = self.op("Mul", self.op("Cast", rows, to=FLOAT), scales)
        else:
            token = self.op("Gather", self.constant(words), "ids")
        return self.norm(self.op("Add", token, near), "embeddings")

    def linear(self, x: str, name: str) -> str:
        weight, bias = self._weights[f"{name}.weight"].T, self.constant(self._weights[f"{name}.bias"])
        if not self._int8:
            return self.op("Add", self.op("MatMul", x, self.constant(weight)), bias)
        scale = (np.abs(weight).max(axis=0) / 127 + 1e-12).astype(np.float32)
        levels, step, zero = self.ops("DynamicQuantizeLinear", x, outputs=3)
        whole = self.op("MatMulInteger", levels, self.constant(np.round(weight / scale).astype(np.int8)), zero)
        factor = self.op("Mul", step, self.constant(scale))
        return self.op("Add", self.op("Mul", self.op("Cast", whole, to=FLOAT), factor), bias)

    def norm(self, x: str, name: str) -> str:
        scale, shift = (self.constant(self._weights[f"{name}.LayerNorm.{part}"]) for part in ("weight", "bias"))
        return self.op("LayerNormalization", x, scale, shift, axis=-1, epsilon=self._shape.layer_norm_eps)

    def constant(self, value: NDArray[np.generic] | list[int]) -> str:
        name = self._name("c")
        self.constants[name] = np.array(value, np.int64) if isinstance(value, list) else np.ascontiguousarray(value)
        return name

    def op(self, kind: str, *inputs: str, **attributes: Attribute) -> str:
        return self.ops(kind, *inputs, outputs=1, **attributes)[0]

    def ops(self, kind: str, *inputs: str, outputs: int, **attributes: Attribute) -> list[str]:
        names = [self._name("v") for _ in range(outputs)]
        self.nodes.append(Node(kind, inputs, names, attributes))
        return names

    def _name(self, letter: str) -> str:
        self._count += 1
        return f"{letter}{self._count}"
