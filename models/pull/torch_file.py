"""Read the tensors of a file that `torch.save` wrote, without torch, and without running anything that is in it.

Both formats are pickles of names and sizes beside raw arrays (pytorch: torch/serialization.py): since torch 1.6 a ZIP
archive, before it pickles behind a magic number. Only what tensors need is unpickled.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..catalog.artifact import ArtifactError

_MAGIC = 0x1950A86A20F9469CFC6C
_LENGTH = struct.Struct("<q")
_KINDS: Mapping[str, np.dtype[np.generic]] = {
    "FloatStorage": np.dtype("<f4"),
    "HalfStorage": np.dtype("<f2"),
    "LongStorage": np.dtype("<i8"),
}


class _Storage(msgspec.Struct, frozen=True):
    kind: str  # key of `_KINDS`
    key: str


class _Stored(msgspec.Struct, frozen=True):
    """A tensor's place in a storage; sizes in elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_tensors(path: Path) -> dict[str, NDArray[np.float32]]:
    """Return the tensors by name, as float32.

    Raises:
        ArtifactError: it is no such file, or holds anything but tensors.
    """
    try:
        with path.open("rb") as file:
            names, arrays = _read_archive(file) if zipfile.is_zipfile(path) else _read_pickles(file)
        if not isinstance(names, dict):
            raise ArtifactError(f"{path}: it holds no tensors by name")
        return {str(name): _array(stored, arrays) for name, stored in names.items() if isinstance(stored, _Stored)}
    except (OSError, EOFError, pickle.UnpicklingError, KeyError, ValueError, TypeError, zipfile.BadZipFile) as error:
        raise ArtifactError(f"{path}: no file of torch with tensors ({error})") from error


def _read_pickles(file: io.BufferedReader) -> tuple[object, Mapping[str, bytes]]:
    if _Unpickler(file).load() != _MAGIC:
        raise pickle.UnpicklingError("the magic number is missing")
    for _ in ("protocol version", "byte order and sizes"):
        _Unpickler(file).load()
    unpickler = _Unpickler(file)
    names = unpickler.load()
    arrays = {}
    for key in _Unpickler(file).load():
        (elements,) = _LENGTH.unpack(file.read(_LENGTH.size))
        arrays[str(key)] = file.read(elements * _KINDS[unpickler.kinds[str(key)]].itemsize)
    return names, arrays


def _read_archive(file: io.BufferedReader) -> tuple[object, Mapping[str, bytes]]:
    with zipfile.ZipFile(file) as archive:
        (index,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        unpickler = _Unpickler(io.BytesIO(archive.read(index)))
        names = unpickler.load()
        folder = index.removesuffix("data.pkl") + "data/"
        return names, {key: archive.read(folder + key) for key in unpickler.kinds}


class _Unpickler(pickle.Unpickler):
    """Builds places of tensors; refuses every other class and function."""

    def __init__(self, file: io.BufferedReader | io.BytesIO) -> None:
        super().__init__(file)
        self.kinds: dict[str, str] = {}  # of the storages, by key

    def find_class(self, module: str, name: str) -> object:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _stored
        if module == "torch" and name in _KINDS:
            return name
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a tensor")

    def persistent_load(self, identity: tuple[str, str, str]) -> _Storage:
        _, kind, key, *_ = identity
        self.kinds[str(key)] = kind
        return _Storage(kind, str(key))


def _stored(storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: object) -> _Stored:
    return _Stored(storage, offset, tuple(shape), tuple(strides))


def _array(stored: _Stored, arrays: Mapping[str, bytes]) -> NDArray[np.float32]:
    whole = np.frombuffer(arrays[stored.storage.key], _KINDS[stored.storage.kind])
    last = stored.offset + sum(
        (size - 1) * stride for size, stride in zip(stored.shape, stored.strides, strict=True) if size
    )
    if min(stored.offset, *stored.shape, *stored.strides, 0) < 0 or last >= len(whole):
        raise ValueError("a tensor that lies outside of its storage")
    strides = [stride * whole.itemsize for stride in stored.strides]
    return np.lib.stride_tricks.as_strided(whole[stored.offset :], stored.shape, strides).astype(np.float32)
