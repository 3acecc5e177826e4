"""GGUF files made byte by byte, so that a test can put any lie into one."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf

from causeway_server.models.catalog.artifact import find_artifact

SHIPPED = find_artifact("assistant").path
UINT32, STRING, ARRAY, UINT64 = 4, 8, 9, 10


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, value: object) -> bytes:
    """Return one key-value pair; `bytes` are the raw type and value."""
    if isinstance(value, bytes):
        return text(key) + value
    if isinstance(value, str):
        return text(key) + struct.pack("<I", STRING) + text(value)
    if isinstance(value, int):
        return text(key) + struct.pack("<II", UINT32, value)
    assert isinstance(value, Sequence)
    strings = b"".join(text(str(one)) for one in value)
    return text(key) + struct.pack("<IIQ", ARRAY, STRING, len(value)) + strings


def tensor(name: str, shape: Sequence[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def header(
    pairs: Sequence[bytes], tensors: Sequence[bytes] = (), *, counts: tuple[int, int] | None = None, version: int = 3
) -> bytes:
    """Return the header; `counts` lies about the numbers of tensors and pairs."""
    tensor_count, pair_count = counts or (len(tensors), len(pairs))
    return b"GGUF" + struct.pack("<IQQ", version, tensor_count, pair_count) + b"".join(pairs) + b"".join(tensors)


NETWORK: Mapping[str, object] = {
    "general.architecture": "llama",
    "llama.block_count": 24,
    "llama.embedding_length": 896,
    "llama.context_length": 32768,
    "llama.attention.head_count": 14,
    "llama.attention.head_count_kv": 2,
}


def network_header(tensors: int = 0) -> bytes:
    """Return the header of a plausible network, cut off before its tensors."""
    pairs = [pair(key, value) for key, value in NETWORK.items()]
    return header(pairs, counts=(tensors, len(pairs)))


def changed_copy(target: Path, **values: object) -> Path:
    """Copy the shipped assistant with other metadata values (`__` stands for a dot); the weights stay."""
    source = gguf.GGUFReader(SHIPPED)
    writer = gguf.GGUFWriter(target, "llama")
    wanted = {name.replace("__", "."): value for name, value in values.items()}
    for name, field in source.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value, kind = wanted.pop(name, field.contents()), field.types[0]
        writer.add_key_value(name, value, kind, field.types[-1] if len(field.types) > 1 else None)
    assert not wanted, f"the shipped model has no {wanted}"
    for one in source.tensors:
        writer.add_tensor(one.name, one.data, raw_dtype=one.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
