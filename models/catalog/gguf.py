"""Metadata of a GGUF file, read without loading the weights (format: github.com/ggml-org/ggml, docs/gguf.md).

The header is read strictly: every count and length is checked against the remaining bytes before it is used, so a
hostile file costs no more than its own size in time, and a fixed amount of memory. The first part of a file (fetched
before a download) is enough for most of the metadata.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import mmap
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

import msgspec

from causeway_server.router.documents.data import table_of

from .artifact import ArtifactError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_NAME_BYTES = 65_535  # of a key, by the format
_MAX_PAIRS, _MAX_TENSORS = 65_536, 200_000
_MAX_TEXT_BYTES = 16 * 2**20  # of a text value; the longest are chat templates
_MAX_STRINGS = 4_000_000  # of one array; the largest vocabularies have 262,144
_LISTED = 4096  # arrays of at most so many numbers are read, longer ones only counted
_MAX_DIMENSIONS = 4
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32  # of the weights, unless the metadata says otherwise
# Number of a tensor's type → its name, elements of a block and bytes of a block (ggml's `type_traits`). The package
# gguf has them too, but brings numpy into every process that reads a chat template.
TYPES = table_of(__package__, "tensor_types.json", dict[int, tuple[str, int, int]])
_ADAPTER_KEYS = ("general.type", "general.architecture", "adapter.type")
_BLOCK = re.compile(r"blk\.(\d{1,6})\.")


class StringArray(msgspec.Struct, frozen=True):
    """The position of an array's strings in the file."""

    count: int
    offset: int  # offset of the first string's length


class LongArray(msgspec.Struct, frozen=True):
    """The position of a long array's numbers in the file."""

    count: int
    offset: int
    layout: str  # format of one number, as in `struct`


Value = int | float | bool | str | tuple[int | float | bool, ...] | StringArray | LongArray


class TensorInfo(msgspec.Struct, frozen=True):
    name: str
    type_name: str  # type of the elements, such as Q4_K
    elements: int
    size_bytes: int


class GgufHeader(msgspec.Struct, frozen=True):
    """The content of a file before its weights. `is_complete`: False if the data ended before the header did."""

    metadata: Mapping[str, Value]
    tensors: tuple[TensorInfo, ...]
    is_complete: bool


class _Incomplete(Exception):
    """The bytes at hand end before the header does."""


def read_header(data: bytes | mmap.mmap, size_bytes: int, where: str) -> GgufHeader:
    """Read the header from the first bytes of a file, or from all of them.

    `size_bytes`: of the whole file; `where` names it. Raises ArtifactError, with the position, for contradictions.
    """
    reader = _HeaderReader(data, size_bytes, where)
    metadata: dict[str, Value] = {}
    tensors: list[TensorInfo] = []
    try:
        pairs, count = reader.preamble()
        for _ in range(pairs):
            key = reader.name("a key")
            if key in metadata:
                reader.fail(f"the key {key!r} occurs twice")
            metadata[key] = reader.value(key)
        ends = [reader.tensor(tensors) for _ in range(count)]
    except _Incomplete:
        return GgufHeader(metadata, (), is_complete=False)
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
        reader.fail(f"general.alignment is {alignment!r}")
    first = math.ceil(reader.at / alignment) * alignment
    for tensor, end in zip(tensors, ends, strict=True):
        if first + end > size_bytes:
            reader.fail(
                f"the tensor {tensor.name!r} ends at byte {first + end:,}, but the file has "
                f"{size_bytes:,}: it is truncated; copy or download it again"
            )
    return GgufHeader(metadata, tuple(tensors), is_complete=True)


def read_strings(data: bytes | mmap.mmap, array: StringArray) -> Iterator[bytes]:
    """Yield the strings of an array that `read_header` has found in `data`."""
    at = array.offset
    for _ in range(array.count):
        (length,) = struct.unpack_from("<Q", data, at)
        yield data[at + 8 : at + 8 + length]
        at += 8 + length


def read_numbers(data: bytes | mmap.mmap, array: LongArray) -> tuple[int | float | bool, ...]:
    """Return the numbers of an array that `read_header` has found in `data`."""
    return struct.unpack_from(f"<{array.count}{array.layout}", data, array.offset)


class _HeaderReader:
    def __init__(self, data: bytes | mmap.mmap, size_bytes: int, where: str) -> None:
        self._data = data
        self._size_bytes = size_bytes
        self._where = where
        self.at = 0

    def fail(self, fault: str) -> NoReturn:
        """Raise ArtifactError with the fault and its position."""
        raise ArtifactError(f"{self._where}: not a usable GGUF file: at byte {self.at:,}: {fault}")

    def preamble(self) -> tuple[int, int]:
        """Return the numbers of key-value pairs and tensors."""
        if bytes(self._data[:4]) != MAGIC:
            self.fail(f"the file starts with {bytes(self._data[:4])!r}, not {MAGIC!r}")
        self.at = 4
        (version,) = self._unpack("I", "the version")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            self.fail(
                "the byte order of the file is big endian"
                if swapped
                else f"version {version} of the format is not known"
            )
        tensors, pairs = self._unpack("QQ", "the counts")
        self._check_count(pairs, 13, "key-value pairs", _MAX_PAIRS)
        self._check_count(tensors, 24, "tensors", _MAX_TENSORS)
        return pairs, tensors

    def name(self, what: str) -> str:
        raw = self._string(what)
        if not raw or len(raw) > _MAX_NAME_BYTES:
            self.fail(f"{what} has the invalid length of {len(raw):,} bytes")
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8")

    def value(self, key: str) -> Value:
        (kind,) = self._unpack("I", f"the type of {key!r}")
        if kind == _STRING:
            return self._string(f"the value of {key!r}").decode(errors="replace")
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            self.fail(f"{key!r} has the unknown type {kind}")
        (value,) = self._unpack(_SCALARS[kind], f"the value of {key!r}")
        return value

    def tensor(self, found: list[TensorInfo]) -> int:
        """Append the next tensor to `found`, and return its end in bytes from the start of the first tensor."""
        name = self.name("a tensor's name")
        (dimensions,) = self._unpack("I", f"the tensor {name!r}")
        if not 0 < dimensions <= _MAX_DIMENSIONS:
            self.fail(f"the tensor {name!r} has {dimensions} dimensions, which is not supported")
        shape = self._unpack("Q" * dimensions, f"the tensor {name!r}")
        kind, offset = self._unpack("IQ", f"the tensor {name!r}")
        try:
            type_name, block, block_bytes = TYPES[kind]
        except KeyError:
            self.fail(f"the tensor {name!r} has the unknown type {kind}")
        elements = math.prod(shape)
        if shape[0] % block:
            self.fail(f"the tensor {name!r} has rows of {shape[0]:,} elements, which is not a multiple of {block}")
        size_bytes = elements // block * block_bytes
        found.append(TensorInfo(name, type_name, elements, size_bytes))
        return int(offset + size_bytes)

    def _array(self, key: str) -> Value:
        kind, count = self._unpack("IQ", f"the array {key!r}")
        if kind == _STRING:
            self._check_count(count, 8, f"strings in {key!r}", _MAX_STRINGS)
            return self._skip_strings(key, count)
        if kind not in _SCALARS:
            self.fail(f"the array {key!r} is of type {kind}; arrays hold numbers or strings")
        width = struct.calcsize("<" + _SCALARS[kind])
        self._check_count(count, width, f"numbers in {key!r}", self._size_bytes)
        if count <= _LISTED:
            return self._unpack(_SCALARS[kind] * count, f"the array {key!r}")
        array = LongArray(count, self.at, _SCALARS[kind])
        self._advance(count * width, f"the array {key!r}")
        return array

    def _skip_strings(self, key: str, count: int) -> StringArray:
        array = StringArray(count, self.at)
        try:
            for _ in range(count):
                (length,) = self._unpack("Q", f"a string of {key!r}")
                self._advance(length, f"a string of {key!r}")
        except _Incomplete:
            self.at = len(self._data)  # the next read ends the header; the count is known
        return array

    def _string(self, what: str) -> bytes:
        (length,) = self._unpack("Q", what)
        if _MAX_TEXT_BYTES < length <= self._size_bytes:
            self.fail(f"{what} takes {length:,} bytes, which is more than {_MAX_TEXT_BYTES:,} bytes")
        start = self.at
        self._advance(length, what)
        return bytes(self._data[start : self.at])

    def _unpack(self, layout: str, what: str) -> tuple[int, ...]:
        layout = "<" + layout
        start = self.at
        self._advance(struct.calcsize(layout), what)
        return struct.unpack_from(layout, self._data, start)

    def _advance(self, length: int, what: str) -> None:
        if self.at + length > self._size_bytes:
            self.fail(f"{what} takes {length:,} bytes, but the file ends at {self._size_bytes:,}: it is truncated")
        if self.at + length > len(self._data):
            raise _Incomplete
        self.at += length

    def _check_count(self, count: int, least_bytes: int, what: str, most: int) -> None:
        if count > most or count * least_bytes > self._size_bytes - self.at:
            self.fail(
                f"the file of {self._size_bytes:,} bytes declares {count:,} {what}, but at most {most:,} are accepted"
            )


class GgufFile(msgspec.Struct, frozen=True):
    """Metadata of a GGUF. Sizes in elements unless the name says otherwise; absent keys are None or 0."""

    architecture: str
    name: str | None
    licence: str | None
    quantisation: str  # tensor type of most of the weights
    parameters: int
    size_bytes: int
    tensors_bytes: int
    context_length: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    key_width: int  # width of one head's keys
    value_width: int
    vocabulary: int
    chat_template: str | None
    refuse_token: str | None
    tokenizer_sha256: str | None
    tensor_types: Mapping[str, int]  # number of elements by tensor type


def read_gguf(path: Path) -> GgufFile:
    """Read header and metadata. Raises ArtifactError, with fault and position, for an incomplete GGUF."""
    with _mapped(path) as data:
        return describe(data, len(data), str(path))


def read_layers(path: Path) -> tuple[GgufFile, list[int], int]:
    """Read header, metadata, and bytes of each layer's weights and of the output layer's. Raises ArtifactError."""
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
    """Read wanted metadata values; arrays become lists of texts or tuples of numbers. Raises ArtifactError."""
    with _mapped(path) as data:
        header = read_header(data, len(data), str(path))
        return {key: _whole(value, data) for key, value in header.metadata.items() if is_wanted(key)}


def adapted_architecture(path: Path) -> str:
    """Return the architecture of the model that a LoRA adapter belongs to. Raises ArtifactError for another file."""
    metadata = read_metadata(path, lambda key: key in _ADAPTER_KEYS)
    kind = metadata.get("adapter.type") or metadata.get("general.type") or "a model"
    if kind != "lora":
        raise ArtifactError(
            f"{path} is not a LoRA adapter but {kind}; llama.cpp's convert_lora_to_gguf.py makes an adapter from "
            "PEFT's files"
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
    """Describe a GGUF by its first bytes, or all of them. Tensors missing in the header are taken to fill the rest.

    `size_bytes`: of the whole file; `where` names it. Raises ArtifactError, also without the network's sizes.
    """
    header = read_header(data, size_bytes, where)
    architecture = _text(header, "general.architecture")
    if architecture is None:
        raise ArtifactError(f"{where}: `general.architecture` is missing")
    types: Counter[str] = Counter()
    for tensor in header.tensors:
        types[tensor.type_name] += tensor.elements
    tensors_bytes = sum(tensor.size_bytes for tensor in header.tensors)
    heads = _number(header, f"{architecture}.attention.head_count")
    width = _number(header, f"{architecture}.embedding_length")
    head_width, tokens = width // heads if heads else 0, header.metadata.get("tokenizer.ggml.tokens")
    return GgufFile(
        architecture=architecture,
        name=_text(header, "general.name"),
        licence=_text(header, "general.license"),
        quantisation=types.most_common(1)[0][0] if types else "none",
        parameters=sum(types.values()),
        size_bytes=size_bytes,
        tensors_bytes=tensors_bytes if header.is_complete else size_bytes,
        context_length=_number(header, f"{architecture}.context_length"),
        layers=_number(header, f"{architecture}.block_count"),
        width=width,
        heads=heads,
        kv_heads=_number(header, f"{architecture}.attention.head_count_kv") or heads,
        key_width=_number(header, f"{architecture}.attention.key_length") or head_width,
        value_width=_number(header, f"{architecture}.attention.value_length") or head_width,
        vocabulary=tokens.count if isinstance(tokens, StringArray) else 0,
        chat_template=_text(header, "tokenizer.chat_template"),
        refuse_token=_text(header, "causeway.refuse_token"),
        tokenizer_sha256=_digest(header, data, "tokenizer.ggml.tokens", "tokenizer.ggml.merges")
        if header.is_complete
        else None,
        tensor_types=dict(types),
    )


def _text(header: GgufHeader, key: str) -> str | None:
    value = header.metadata.get(key)
    return value if isinstance(value, str) else None


def _number(header: GgufHeader, key: str) -> int:
    """Return an integer of the header: of a list with a value per layer, the largest; 0 if the key is absent."""
    value = header.metadata.get(key, 0)
    if isinstance(value, tuple):
        return int(max(value, default=0))
    return value if isinstance(value, int) else 0


def _digest(header: GgufHeader, data: bytes | mmap.mmap, *keys: str) -> str | None:
    digest = hashlib.sha256()
    for key in keys:
        value = header.metadata.get(key)
        if not isinstance(value, StringArray):
            return None
        for text in read_strings(data, value):
            digest.update(text + b"\0")
    return digest.hexdigest()
