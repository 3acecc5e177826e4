"""Metadata of a GGUF file, read without loading the weights (format: github.com/ggml-org/ggml, docs/gguf.md)."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from .artifact import ArtifactError
from .gguf_header import GgufHeader, LongArray, StringArray, Value, read_header, read_numbers, read_strings

_ADAPTER_KEYS = ("general.type", "general.architecture", "adapter.type")
_BLOCK = re.compile(r"blk\.(\d{1,6})\.")


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


def read_gguf(path: Path) -> GgufFile:
    """Read header and metadata.

    Raises:
        ArtifactError: the file is not a complete GGUF; the message says what is wrong where.
    """
    with _mapped(path) as data:
        return describe(data, len(data), str(path))


def read_layers(path: Path) -> tuple[GgufFile, list[int], int]:
    """Read header and metadata, and the bytes of each layer's weights and of the output layer's.

    Raises:
        ArtifactError: the file is not a complete GGUF.
    """
    with _mapped(path) as data:
        described = describe(data, len(data), str(path))
        tensors = read_header(data, len(data), str(path)).tensors
    layers = [0] * described.layers
    outer: Counter[str] = Counter()
    for tensor in tensors:
        block = _BLOCK.match(tensor.name)
        if block is not None and int(block.group(1)) < len(layers):
            layers[int(block.group(1))] += tensor.size_bytes
        else:
            outer[tensor.name] += tensor.size_bytes
    # Without weights of its own the output layer uses the embedding's.
    return described, layers, outer["output.weight"] or outer["token_embd.weight"]


def read_metadata(path: Path, is_wanted: Callable[[str], bool]) -> dict[str, object]:
    """Read the metadata values whose keys are wanted; arrays become lists of texts or tuples of numbers.

    Raises:
        ArtifactError: the file is not a complete GGUF.
    """
    with _mapped(path) as data:
        header = read_header(data, len(data), str(path))
        return {key: _whole(value, data) for key, value in header.metadata.items() if is_wanted(key)}


def adapted_architecture(path: Path) -> str:
    """Return the architecture of the models that a LoRA adapter is for.

    Raises:
        ArtifactError: the file is not a complete GGUF, or no LoRA adapter.
    """
    metadata = read_metadata(path, lambda key: key in _ADAPTER_KEYS)
    kind = metadata.get("adapter.type") or metadata.get("general.type") or "a model"
    if kind != "lora":
        raise ArtifactError(
            f"{path}: not a LoRA adapter but {kind}; llama.cpp's convert_lora_to_gguf.py makes one from PEFT's files"
        )
    return str(metadata.get("general.architecture"))


def _whole(value: Value, data: mmap.mmap) -> object:
    if isinstance(value, StringArray):
        return [text.decode(errors="replace") for text in read_strings(data, value)]
    return read_numbers(data, value) if isinstance(value, LongArray) else value


@contextlib.contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    try:
        with path.open("rb") as file:
            if not path.stat().st_size:
                raise ArtifactError(f"{path}: the file is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                yield data
    except OSError as error:
        raise ArtifactError(f"{path}: {error.strerror}") from error


def describe(data: bytes | mmap.mmap, size_bytes: int, where: str) -> GgufFile:
    """Describe a GGUF by its first bytes, or by all of them.

    Args:
        data: the bytes at hand; without the whole header, tensors are taken to fill the file.
        size_bytes: of the whole file.
        where: names the file in errors.

    Raises:
        ArtifactError: the header is malformed, or ends before the sizes of the network are known.
    """
    header = read_header(data, size_bytes, where)
    fields = _Fields(header, data)
    architecture = fields.text("general.architecture")
    if architecture is None:
        raise ArtifactError(f"{where}: `general.architecture` is missing")
    types: Counter[str] = Counter()
    for tensor in header.tensors:
        types[tensor.type_name] += tensor.elements
    tensors_bytes = sum(tensor.size_bytes for tensor in header.tensors)
    heads = fields.number(f"{architecture}.attention.head_count")
    width = fields.number(f"{architecture}.embedding_length")
    head_width = width // heads if heads else 0
    return GgufFile(
        architecture=architecture,
        name=fields.text("general.name"),
        licence=fields.text("general.license"),
        quantisation=types.most_common(1)[0][0] if types else "none",
        parameters=sum(types.values()),
        size_bytes=size_bytes,
        tensors_bytes=tensors_bytes if header.is_complete else size_bytes,
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
        tokenizer_sha256=fields.digest("tokenizer.ggml.tokens", "tokenizer.ggml.merges")
        if header.is_complete
        else None,
        tensor_types=dict(types),
    )


class _Fields:
    """Typed access to a header's key-value pairs."""

    def __init__(self, header: GgufHeader, data: bytes | mmap.mmap) -> None:
        self._metadata = header.metadata
        self._data = data

    def text(self, key: str) -> str | None:
        value = self._metadata.get(key)
        return value if isinstance(value, str) else None

    def number(self, key: str) -> int:
        """Return an integer; of a list (a value per layer) the largest; 0 when absent."""
        value = self._metadata.get(key, 0)
        if isinstance(value, tuple):
            return int(max(value, default=0))
        return value if isinstance(value, int) else 0

    def count(self, key: str) -> int:
        value = self._metadata.get(key)
        return value.count if isinstance(value, StringArray) else 0

    def digest(self, *keys: str) -> str | None:
        digest = hashlib.sha256()
        for key in keys:
            value = self._metadata.get(key)
            if not isinstance(value, StringArray):
                return None
            for text in read_strings(self._data, value):
                digest.update(text + b"\0")
        return digest.hexdigest()
