"""Conversion of EfficientNet-Lite (Tan & Le 2019, without squeeze-and-excitation) from PyTorch weights to ONNX.

The graph takes the decoder's upright pixels, and computes the probabilities of labels and a feature vector. Batch
normalisation is folded into the convolutions. Names of the weights: those of efficientnet_lite_pytorch.

The file that `torch.save` wrote before torch 1.6 is read without torch, and without executing anything in it: it has
pickles of names and sizes, behind a magic number, before raw arrays (pytorch: torch/serialization.py, `_legacy_save`).
Only what tensors need is unpickled.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..catalog.artifact import ArtifactError
from .onnx_writer import FLOAT, UINT8, Attribute, Constant, Node, Port, write_onnx

_MAGIC = 0x1950A86A20F9469CFC6C
_LENGTH = struct.Struct("<q")
_KINDS: Mapping[str, np.dtype[np.generic]] = {
    "FloatStorage": np.dtype("<f4"),
    "HalfStorage": np.dtype("<f2"),
    "LongStorage": np.dtype("<i8"),
}

Weights = Mapping[str, NDArray[np.float32]]
LITE0: Sequence[tuple[int, int]] = ((1, 1), (2, 2), (2, 2), (3, 2), (3, 1), (4, 2), (1, 1))
"""Stages: the number of blocks, and the stride of the first one. All other sizes are those of the weights."""
SIDE = 224  # pixels of the square that the network was trained on
LABELS_KEY = "labels"  # of the metadata: one label per line
_EPSILON = 1e-3  # of batch normalisation
_MEAN, _SCALE = 127.0, 128.0  # of the pixels
_NORM = ("weight", "bias", "running_mean", "running_var")


class _Stored(msgspec.Struct, frozen=True):
    """A tensor's position in the storage that `key` names; sizes in elements."""

    key: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_tensors(path: Path) -> dict[str, NDArray[np.float32]]:
    """Return the tensors by name, as float32.

    Raises:
        ArtifactError: The file is not such a file, or holds anything except tensors.
    """
    try:
        with path.open("rb") as file:
            names, arrays = _read_pickles(file)
        if not isinstance(names, dict):
            raise ArtifactError(f"{path}: the file does not hold tensors by name")
        return {str(name): _array(stored, arrays) for name, stored in names.items() if isinstance(stored, _Stored)}
    except (OSError, EOFError, pickle.UnpicklingError, KeyError, ValueError, TypeError) as error:
        raise ArtifactError(f"{path}: not a torch file with tensors ({error})") from error


def _read_pickles(file: io.BufferedReader) -> tuple[object, Mapping[str, NDArray[np.generic]]]:
    if _Unpickler(file).load() != _MAGIC:
        raise pickle.UnpicklingError("the magic number is missing")
    for _ in ("protocol version", "byte order and sizes"):
        _Unpickler(file).load()
    unpickler = _Unpickler(file)
    names = unpickler.load()
    arrays: dict[str, NDArray[np.generic]] = {}
    for key in _Unpickler(file).load():
        (elements,) = _LENGTH.unpack(file.read(_LENGTH.size))
        kind = _KINDS[unpickler.kinds[str(key)]]
        arrays[str(key)] = np.frombuffer(file.read(elements * kind.itemsize), kind)
    return names, arrays


class _Unpickler(pickle.Unpickler):
    """Unpickles only the descriptions of tensors; every other class and function is refused."""

    def __init__(self, file: io.BufferedReader) -> None:
        super().__init__(file)
        self.kinds: dict[str, str] = {}  # of the storages, by key

    def find_class(self, module: str, name: str) -> object:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _stored
        if module == "torch" and name in _KINDS:
            return name
        raise pickle.UnpicklingError(f"{module}.{name} is not part of a tensor")

    def persistent_load(self, identity: tuple[str, str, str]) -> str:
        _, kind, key, *_ = identity
        self.kinds[str(key)] = kind
        return str(key)


def _stored(key: str, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: object) -> _Stored:
    return _Stored(key, offset, tuple(shape), tuple(strides))


def _array(stored: _Stored, arrays: Mapping[str, NDArray[np.generic]]) -> NDArray[np.float32]:
    whole = arrays[stored.key]
    last = stored.offset + sum(
        (size - 1) * stride for size, stride in zip(stored.shape, stored.strides, strict=True) if size
    )
    if min(stored.offset, *stored.shape, *stored.strides, 0) < 0 or last >= len(whole):
        raise ValueError("a tensor is outside of its storage")
    strides = [stride * whole.itemsize for stride in stored.strides]
    return np.lib.stride_tricks.as_strided(whole[stored.offset :], stored.shape, strides).astype(np.float32)


def write_classifier(
    weights: Weights, labels: Sequence[str], target: Path, stages: Sequence[tuple[int, int]] = LITE0, side: int = SIDE
) -> None:
    """Write the ONNX file `target`: ``pixels`` uint8 [side, side, 3] → ``probabilities`` [labels], ``features`` [n].

    Raises:
        ArtifactError: A weight is missing, or the labels are not as many as the classes.
    """
    graph = _Graph(weights)
    try:
        features = graph.build(stages)
        classes = len(weights["_fc.bias"])
    except KeyError as error:
        raise ArtifactError(f"not an EfficientNet-Lite: the weight {error} is missing") from None
    if classes != len(labels):
        raise ArtifactError(f"{len(labels)} labels for {classes} classes")
    write_onnx(
        target,
        "efficientnet_lite",
        graph.nodes,
        inputs=[Port("pixels", UINT8, [side, side, 3])],
        outputs=[Port("probabilities", FLOAT, [classes]), Port("features", FLOAT, [features])],
        constants=graph.constants,
        metadata={LABELS_KEY: "\n".join(labels)},
    )


def convert(weights: Path, labels: Path, target: Path) -> None:
    """Write EfficientNet-Lite0 as ONNX. Raises ArtifactError.

    Args:
        weights: A file of torch with the state of efficientnet_lite_pytorch's model.
        labels: A JSON list, in the order of the classes.
    """
    try:
        names = msgspec.json.decode(labels.read_bytes(), type=list[str])
    except msgspec.DecodeError as error:
        raise ArtifactError(f"{labels}: not a list of labels ({error})") from error
    write_classifier(read_tensors(weights), names, target)


class _Graph:
    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self.nodes: list[Node] = []
        self.constants: dict[str, Constant] = {
            "mean": np.array(_MEAN, np.float32),
            "scale": np.array(_SCALE, np.float32),
            "zero": np.array(0.0, np.float32),
            "six": np.array(6.0, np.float32),
            "first": np.array([0], np.int64),
        }

    def build(self, stages: Sequence[tuple[int, int]]) -> int:
        """Add all nodes; return the number of features. Raises KeyError for a missing weight."""
        value = self._add("Cast", ["pixels"], {"to": FLOAT})
        value = self._add("Div", [self._add("Sub", [value, "mean"]), "scale"])
        value = self._add("Unsqueeze", [self._add("Transpose", [value], {"perm": [2, 0, 1]}), "first"])
        value = self._relu6(self._convolution(value, "_conv_stem", "_bn0", stride=2))
        number = 0
        for blocks, first_stride in stages:
            for at in range(blocks):
                value = self._block(value, f"_blocks.{number}", first_stride if at == 0 else 1)
                number += 1
        value = self._relu6(self._convolution(value, "_conv_head", "_bn1"))
        flat = self._add("Flatten", [self._add("GlobalAveragePool", [value])])
        self.constants |= {"fc.weight": self._weights["_fc.weight"], "fc.bias": self._weights["_fc.bias"]}
        scores = self._add("Gemm", [flat, "fc.weight", "fc.bias"], {"transB": 1})
        self._add("Squeeze", [self._add("Softmax", [scores]), "first"], output="probabilities")
        self._add("Squeeze", [flat, "first"], output="features")
        return int(self._weights["_fc.weight"].shape[1])

    def _block(self, value: str, name: str, stride: int) -> str:
        """Add an inverted residual block: expand, filter each channel, project."""
        before = value
        if f"{name}._expand_conv.weight" in self._weights:
            value = self._relu6(self._convolution(value, f"{name}._expand_conv", f"{name}._bn0"))
        value = self._relu6(
            self._convolution(value, f"{name}._depthwise_conv", f"{name}._bn1", stride=stride, depthwise=True)
        )
        value = self._convolution(value, f"{name}._project_conv", f"{name}._bn2")
        inputs = self._weights[f"{name}._depthwise_conv.weight"].shape[0]
        if f"{name}._expand_conv.weight" in self._weights:
            inputs = self._weights[f"{name}._expand_conv.weight"].shape[1]
        same = stride == 1 and inputs == self._weights[f"{name}._project_conv.weight"].shape[0]
        return self._add("Add", [value, before]) if same else value

    def _convolution(self, value: str, name: str, norm: str, *, stride: int = 1, depthwise: bool = False) -> str:
        kernel = self._weights[f"{name}.weight"]
        scale, shift, mean, variance = (self._weights[f"{norm}.{part}"] for part in _NORM)
        factor = scale / np.sqrt(variance + _EPSILON)
        self.constants[f"{name}.w"] = (kernel * factor[:, None, None, None]).astype(np.float32)
        self.constants[f"{name}.b"] = (shift - mean * factor).astype(np.float32)
        side = kernel.shape[-1]
        attributes: dict[str, Attribute] = {
            "auto_pad": "SAME_UPPER",  # as TensorFlow pads
            "kernel_shape": [side, side],
            "strides": [stride, stride],
            "group": kernel.shape[0] if depthwise else 1,
        }
        return self._add("Conv", [value, f"{name}.w", f"{name}.b"], attributes)

    def _relu6(self, value: str) -> str:
        return self._add("Clip", [value, "zero", "six"])

    def _add(self, op: str, inputs: Sequence[str], attributes: Mapping[str, Attribute] = {}, output: str = "") -> str:
        output = output or f"{op.lower()}{len(self.nodes)}"
        self.nodes.append(Node(op, inputs, [output], attributes))
        return output
