"""A writer of ONNX files from nodes, constants and metadata, which needs only numpy.

The format is protobuf (onnx/onnx.proto, IR version 9), and this module writes the few messages that small graphs need.
An operator's attribute is an int, a float, a string, or a list of ints.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

Constant = NDArray[np.generic]
Attribute = int | float | str | Sequence[int]

_IR_VERSION, _OPERATOR_SET = 9, 20
FLOAT, UINT8, INT8, INT32, INT64 = 1, 2, 3, 6, 7  # TensorProto.DataType
_KINDS = {"float32": FLOAT, "uint8": UINT8, "int8": INT8, "int32": INT32, "int64": INT64}
_PRODUCER = "causeway-models"


class Node(msgspec.Struct, frozen=True):
    """An operator with the names of its inputs and outputs."""

    op: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    attributes: Mapping[str, Attribute] = {}


class Port(msgspec.Struct, frozen=True):
    """An input or output of the graph. A string in `shape` names a free dimension."""

    name: str
    kind: int
    shape: Sequence[int | str]


def write_onnx(
    path: Path,
    name: str,
    nodes: Sequence[Node],
    *,
    inputs: Sequence[Port],
    outputs: Sequence[Port],
    constants: Mapping[str, Constant],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a graph of `nodes` with named inputs and outputs to `path`."""
    graph = b"".join(_bytes(1, _node(node)) for node in nodes) + _text(2, name)
    graph += b"".join(_bytes(5, _tensor(key, value)) for key, value in constants.items())
    graph += b"".join(_bytes(11, _port(port)) for port in inputs) + b"".join(
        _bytes(12, _port(port)) for port in outputs
    )
    model = _number(1, _IR_VERSION) + _text(2, _PRODUCER) + _bytes(7, graph)
    model += _bytes(8, _text(1, "") + _number(2, _OPERATOR_SET))
    model += b"".join(_bytes(14, _text(1, key) + _text(2, value)) for key, value in (metadata or {}).items())
    path.write_bytes(model)


def _node(node: Node) -> bytes:
    encoded = _texts(1, node.inputs) + _texts(2, node.outputs) + _text(4, node.op)
    return encoded + b"".join(_bytes(5, _attribute(key, value)) for key, value in node.attributes.items())


def _attribute(name: str, value: Attribute) -> bytes:
    """Encode an attribute. Its field 20 names the field that holds the value (AttributeProto.AttributeType)."""
    encoded = _text(1, name)
    if isinstance(value, int):
        return encoded + _number(3, value) + _number(20, 2)
    if isinstance(value, float):
        return encoded + _varint(2 << 3 | 5) + struct.pack("<f", value) + _number(20, 1)
    if isinstance(value, str):
        return encoded + _text(4, value) + _number(20, 3)
    return encoded + b"".join(_number(8, item) for item in value) + _number(20, 7)


def _tensor(name: str, value: Constant) -> bytes:
    dimensions = b"".join(_number(1, size) for size in value.shape)
    little = np.ascontiguousarray(value).astype(value.dtype.newbyteorder("<"))
    return dimensions + _number(2, _KINDS[value.dtype.name]) + _text(8, name) + _bytes(9, little.tobytes())


def _port(port: Port) -> bytes:
    sizes = [_number(1, size) if isinstance(size, int) else _text(2, size) for size in port.shape]
    shape = b"".join(_bytes(1, size) for size in sizes)
    return _text(1, port.name) + _bytes(2, _bytes(1, _number(1, port.kind) + _bytes(2, shape)))


# --- protobuf's wire format ------------------------------------------------------------------------------------------


def _varint(value: int) -> bytes:
    value &= 2**64 - 1  # a negative number is its 64-bit two's complement
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _text(field: int, value: str) -> bytes:
    return _bytes(field, value.encode())


def _texts(field: int, values: Iterable[str]) -> bytes:
    return b"".join(_text(field, value) for value in values)
