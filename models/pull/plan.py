"""The checks of a pull before the first byte: a free name, enough disk, enough memory for the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..catalog.artifact import ArtifactError, ArtifactNotFound, load_artifact
from ..catalog.fit import Device, MemoryNeed, estimate_memory
from ..catalog.gguf import GgufFile, describe
from ..publish.add import check_name
from ..publish.publish import check_space
from .sources import PullError, RemoteFile

_SPARE_BYTES = 128 * 2**20  # of disk: one package of a demonstration model, and everything else
MIB = 2**20


class FitOptions(msgspec.Struct, frozen=True):
    """The memory that a model is to fit. `force`: pull it even if it does not."""

    device: Device
    context: int  # tokens per sequence
    batch: int  # sequences
    force: bool = False


def is_present(name: str, root: Path, sha256: str) -> bool:
    """Return whether the model is there already; a damaged or foreign one is not.

    Raises:
        ArtifactError: another model has the name, or the name is not valid.
    """
    try:
        artifact = load_artifact(root / name)
    except ArtifactNotFound:
        check_name(name, root)
        return False
    if artifact.manifest.sha256 == sha256 and artifact.path.is_file():
        return True
    raise PullError(f"{artifact.folder}: another model has this name; choose one with --name, or delete the folder")


def check_disk(file: RemoteFile, present_bytes: int, folder: Path, what: str) -> None:
    """Raises PullError with the figures if the rest of the file does not fit the disk."""
    try:
        check_space(file.size_bytes - present_bytes + _SPARE_BYTES, folder)
    except ArtifactError as error:
        raise PullError(f"{what}: the disk is too full: {error}") from error


def describe_remote(first: bytes, file: RemoteFile) -> GgufFile | None:
    """Describe a file by its first bytes; None if they do not hold enough of the header.

    Raises:
        ArtifactError: they contradict themselves, or are no GGUF.
    """
    gguf = describe(first, file.size_bytes, file.name)
    return gguf if gguf.layers and gguf.width else None


def check_memory(
    gguf: GgufFile,
    file: RemoteFile,
    others: Sequence[RemoteFile],
    options: FitOptions,
    what: str,
    beside_bytes: int = 0,
) -> MemoryNeed:
    """Return the memory that a model needs.

    Args:
        others: the other files of the same model, of which a smaller one may fit.
        beside_bytes: of its mmproj file, which must fit too.

    Raises:
        PullError: it does not fit; the message has the figures and the next smaller file that does.
    """
    need = estimate_memory(gguf, context=options.context, batch=options.batch)
    usable = options.device.usable_bytes - beside_bytes
    if need.total_bytes <= usable or options.force:
        return need
    room = usable - (need.total_bytes - file.size_bytes)
    smaller = [one for one in others if one.size_bytes < file.size_bytes]
    fitting = max((one for one in smaller if one.size_bytes <= room), key=lambda one: one.size_bytes, default=None)
    if fitting is not None:
        advice = f"the next smaller that fits is {fitting.name} ({fitting.size_bytes / MIB:,.0f} MiB)"
    elif smaller:
        least = min(smaller, key=lambda one: one.size_bytes)
        advice = f"the smallest, {least.name} ({least.size_bytes / MIB:,.0f} MiB), does not fit either"
    else:
        advice = f"weights of at most {max(0, room) / MIB:,.0f} MiB would fit"
    raise PullError(
        f"{what}: needs {need.total_bytes / MIB:,.0f} MiB of memory (weights {need.weights_bytes / MIB:,.0f}, KV cache "
        f"of {options.batch} × {options.context} tokens {need.cache_bytes / MIB:,.0f}, buffers "
        f"{need.buffers_bytes / MIB:,.0f}), and {options.device.name} has {usable / MIB:,.0f} MiB to use; {advice}. "
        "Lower --context or --batch, or use --force"
    )
