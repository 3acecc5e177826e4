"""Metadata of a GGUF file, read without loading the weights (format: github.com/ggml-org/ggml, docs/gguf.md)."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import gguf
import msgspec

from .artifact import ArtifactError


class GgufFile(msgspec.Struct, frozen=True):
    """Metadata of a GGUF. Sizes in elements unless the name says otherwise; absent keys are None or 0."""

    architecture: str
    name: str | None
    licence: str | None
    quantisation: str  # the tensor type of most of the weights
    parameters: int
    size_bytes: int
    tensors_bytes: int
    context_length: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    key_width: int  # per head
    value_width: int
    vocabulary: int
    chat_template: str | None
    refuse_token: str | None
    tokenizer_sha256: str | None
    tensor_types: Mapping[str, int]  # elements by tensor type


def open_gguf(path: Path, mode: Literal["r", "r+"] = "r") -> gguf.GGUFReader:
    """Map a GGUF into memory; its weights are read, or with `r+` written, in place.

    Raises:
        ArtifactError: the file is not a complete GGUF.
    """
    try:
        return gguf.GGUFReader(path, mode)
    except (OSError, ValueError, IndexError, KeyError, UnicodeDecodeError, OverflowError, MemoryError) as error:
        raise ArtifactError(
            f"{path}: not a readable GGUF file: cut short or damaged; copy it again ({error})"
        ) from error


def read_gguf(path: Path) -> GgufFile:
    """Read header and metadata.

    Raises:
        ArtifactError: the file is not a complete GGUF.
    """
    reader = open_gguf(path)
    fields = _Fields(reader)
    architecture = fields.text("general.architecture")
    if architecture is None:
        raise ArtifactError(f"{path}: `general.architecture` is missing")
    types: Counter[str] = Counter()
    for tensor in reader.tensors:
        types[tensor.tensor_type.name] += int(tensor.n_elements)
    heads = fields.number(f"{architecture}.attention.head_count")
    width = fields.number(f"{architecture}.embedding_length")
    head_width = width // heads if heads else 0
    return GgufFile(
        architecture=architecture,
        name=fields.text("general.name"),
        licence=fields.text("general.license"),
        quantisation=types.most_common(1)[0][0] if types else "none",
        parameters=sum(types.values()),
        size_bytes=path.stat().st_size,
        tensors_bytes=sum(int(tensor.n_bytes) for tensor in reader.tensors),
        context_length=fields.number(f"{architecture}.context_length"),
        layers=fields.number(f"{architecture}.block_count"),
        width=width,
        heads=heads,
        kv_heads=fields.number(f"{architecture}.attention.head_count_kv") or heads,
        key_width=fields.number(f"{architecture}.attention.key_length") or head_width,
        value_width=fields.number(f"{architecture}.attention.value_length") or head_width,
        vocabulary=fields.count("tokenizer.ggml.tokens"),
        chat_template=fields.text("tokenizer.chat_template"),
        refuse_token=fields.text("causeway.refuse_token"),
        tokenizer_sha256=fields.digest("tokenizer.ggml.tokens", "tokenizer.ggml.merges"),
        tensor_types=dict(types),
    )


class _Fields:
    """Typed access to a reader's key-value pairs."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._reader = reader

    def text(self, key: str) -> str | None:
        field = self._reader.get_field(key)
        value = field.contents() if field is not None else None
        return value if isinstance(value, str) else None

    def number(self, key: str) -> int:
        """Return an integer; of a list (a value per layer) the largest; 0 when absent."""
        field = self._reader.get_field(key)
        value = field.contents() if field is not None else 0
        if isinstance(value, list):
            return int(max(value, default=0))
        return int(value) if isinstance(value, int) else 0

    def count(self, key: str) -> int:
        field = self._reader.get_field(key)
        return len(field.data) if field is not None else 0

    def digest(self, *keys: str) -> str | None:
        digest = hashlib.sha256()
        for key in keys:
            field = self._reader.get_field(key)
            if field is None:
                return None
            for index in field.data:
                digest.update(bytes(field.parts[index]) + b"\0")
        return digest.hexdigest()
