"""The encoder of panels and the projector of its features, in torch and as ONNX.

Every cell goes through the same small convolutional network; the projector is linear, from a cell's features to the
embeddings of its two digits. The words between the digits are constants.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ..signals.onnx_writer import FLOAT, UINT8, Attribute, Constant, Node, Port, write_onnx
from .drawing import CELLS

SIDE = 64  # pixels of a cell
FEATURES = 64
_CHANNELS = (16, 32, 64, 64)
_CELLS, _DIGITS = len(CELLS), 2
_FLAT = _CHANNELS[-1] * (SIDE // 2 ** len(_CHANNELS)) ** 2


class CaptionRows(msgspec.Struct, frozen=True):
    """A panel's caption in the rows of one language model's embeddings.

    `words`: [tokens, dimensions], 0 where a digit stands; `places`: of the digits, by cell, [cells][2]; `digits`: the
    rows of 0 to 9.
    """

    words: NDArray[np.float32]
    places: tuple[tuple[int, int], ...]
    digits: NDArray[np.float32]


class PanelReader(nn.Module):
    """Pixels uint8 [n, side, 3 · side, 3] → the embeddings of the digits, [n, cells, 2, dimensions].

    Args:
        digits: the rows of 0 to 9. The projector learns in units of their spread, from their mean.
    """

    def __init__(self, digits: NDArray[np.float32]) -> None:
        super().__init__()
        self._mean = torch.from_numpy(digits.mean(axis=0))
        self._spread = float(digits.std(axis=0).mean())
        dimensions = digits.shape[1]
        inputs = (3, *_CHANNELS[:-1])
        self.convolutions = nn.ModuleList(
            nn.Conv2d(before, after, 3, stride=2, padding=1) for before, after in zip(inputs, _CHANNELS, strict=True)
        )
        self.features = nn.Linear(_FLAT, FEATURES)
        self.projector = nn.Linear(FEATURES, _DIGITS * dimensions)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        count = len(pixels)
        value = pixels.to(torch.float32).div(255.0).reshape(count, SIDE, _CELLS, SIDE, 3).permute(0, 2, 4, 1, 3)
        value = value.reshape(count * _CELLS, 3, SIDE, SIDE)
        for convolution in self.convolutions:
            value = convolution(value).relu()
        features = self.features(value.flatten(1)).relu()
        projected: torch.Tensor = self.projector(features).reshape(count, _CELLS, _DIGITS, -1)
        return self._mean + self._spread * projected

    def projection(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the projector's weights [features, 2 · dimensions] and bias, from features to embeddings."""
        weight, bias = _array(self.projector.weight).T * self._spread, _array(self.projector.bias) * self._spread
        return np.ascontiguousarray(weight), bias + np.tile(self._mean.numpy(), _DIGITS)


def write_encoder(reader: PanelReader, target: Path) -> None:
    """Write ``pixels`` uint8 [pictures, side, 3 · side, 3] → ``features`` float32 [pictures, cells, n]."""
    nodes: list[Node] = []
    constants: dict[str, Constant] = {
        "full": np.array(255.0, np.float32),
        "cells": np.array([0, SIDE, _CELLS, SIDE, 3], np.int64),
        "flat": np.array([-1, 3, SIDE, SIDE], np.int64),
        "whole": np.array([-1, _CELLS, FEATURES], np.int64),
    }

    def add(op: str, inputs: list[str], attributes: dict[str, Attribute] | None = None, output: str = "") -> str:
        output = output or f"{op.lower()}{len(nodes)}"
        nodes.append(Node(op, inputs, [output], attributes or {}))
        return output

    value = add("Div", [add("Cast", ["pixels"], {"to": FLOAT}), "full"])
    value = add("Transpose", [add("Reshape", [value, "cells"])], {"perm": [0, 2, 4, 1, 3]})
    value = add("Reshape", [value, "flat"])
    for index, convolution in enumerate(reader.convolutions):
        assert isinstance(convolution, nn.Conv2d)
        weight, bias = f"conv{index}.w", f"conv{index}.b"
        constants |= {weight: _array(convolution.weight), bias: _array(convolution.bias)}
        attributes: dict[str, Attribute] = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}
        value = add("Relu", [add("Conv", [value, weight, bias], attributes)])
    constants |= {"features.w": _array(reader.features.weight), "features.b": _array(reader.features.bias)}
    value = add("Gemm", [add("Flatten", [value]), "features.w", "features.b"], {"transB": 1})
    add("Reshape", [add("Relu", [value]), "whole"], output="features")
    write_onnx(
        target,
        "panel_encoder",
        nodes,
        inputs=[Port("pixels", UINT8, ["pictures", SIDE, SIDE * _CELLS, 3])],
        outputs=[Port("features", FLOAT, ["pictures", _CELLS, FEATURES])],
        constants=constants,
    )


def write_projector(reader: PanelReader, rows: CaptionRows, target: Path) -> None:
    """Write ``features`` float32 [pictures, cells, n] → ``embeddings`` [pictures, tokens, dimensions]."""
    tokens, dimensions = rows.words.shape
    digits, (weight, bias) = _CELLS * _DIGITS, reader.projection()
    spread = np.zeros((tokens, digits), np.float32)  # puts each digit at its place
    spread[[place for pair in rows.places for place in pair], np.arange(digits)] = 1.0
    write_onnx(
        target,
        "panel_projector",
        [
            Node("MatMul", ["features", "weight"], ["product"]),
            Node("Add", ["product", "bias"], ["cells"]),
            Node("Reshape", ["cells", "rows"], ["digits"]),
            Node("MatMul", ["spread", "digits"], ["placed"]),
            Node("Add", ["placed", "words"], ["embeddings"]),
        ],
        inputs=[Port("features", FLOAT, ["pictures", _CELLS, FEATURES])],
        outputs=[Port("embeddings", FLOAT, ["pictures", tokens, dimensions])],
        constants={
            "weight": weight,
            "bias": bias,
            "rows": np.array([0, digits, dimensions], np.int64),
            "spread": spread,
            "words": rows.words,
        },
    )


def _array(tensor: torch.Tensor | None) -> NDArray[np.float32]:
    assert tensor is not None
    return tensor.detach().numpy().astype(np.float32)
