"""The plan of a pull: the sources of `causeway-models pull`, and the checks before and after the download.

Before: a free name, enough disk, enough memory for the model. A partial download has its own file and a lock; its
checksum is compared at the end.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from ..catalog.artifact import ArtifactError, ArtifactNotFound, load_artifact, sha256_of
from ..catalog.fit import Device, MemoryNeed, estimate_memory
from ..catalog.gguf import GgufFile, describe
from ..publish.add import check_name
from ..publish.publish import check_space

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SPARE_BYTES = 128 * 2**20  # of disk: one package of a demonstration model, and everything else
MIB = 2**20


class PullError(ArtifactError):
    """A model cannot be pulled; the message says why and what to do."""


class HubSource(msgspec.Struct, frozen=True):
    """A repository on a hub that speaks Hugging Face's API. `choice`: a file, a quantisation, or empty."""

    repository: str
    choice: str = ""


class UrlSource(msgspec.Struct, frozen=True):
    url: str
    sha256: str


class DemoSource(msgspec.Struct, frozen=True):
    """Models of the demonstration, named by a pair or by one model."""

    name: str


Source = HubSource | UrlSource | DemoSource


class RemoteFile(msgspec.Struct, frozen=True):
    """A weights file on a server."""

    name: str  # name of the file, with its folders
    size_bytes: int
    sha256: str
    licence: str  # licence that the hub names; empty if it names none


def parse_source(text: str, sha256: str | None) -> Source:
    """Read ``hf:OWNER/REPO[:FILE or quantisation]``, ``demo:NAME``, or a URL with SHA-256. Raises PullError."""
    kind, _, rest = text.partition(":")
    if sha256 is not None:
        sha256 = sha256.lower().removeprefix("sha256:")
        if not _SHA256.fullmatch(sha256):
            raise PullError(f"--sha256 {sha256}: the value must have 64 hexadecimal digits")
    if kind in ("http", "https") and urlsplit(text).hostname:
        if sha256 is None:
            raise PullError(f"{text}: a URL needs --sha256, so that you get the file that you mean")
        return UrlSource(text, sha256)
    if sha256 is not None:
        raise PullError("--sha256 is for URLs; other sources name their checksums themselves")
    if kind == "hf":
        repository, _, choice = rest.partition(":")
        if not _REPOSITORY.fullmatch(repository):
            raise PullError(f"{text}: write hf:OWNER/REPO, hf:OWNER/REPO:FILE.gguf or hf:OWNER/REPO:Q4_K_M")
        return HubSource(repository, choice)
    if kind == "demo" and rest:
        return DemoSource(rest)
    raise PullError(f"{text}: write hf:OWNER/REPO[:FILE or quantisation], demo:NAME, speech, or a URL")


def partial_of(target: Path) -> Path:
    return target.with_name(f"{target.name}.partial")


def check_sha256(partial: Path, expected: str, origin: str) -> None:
    """Compare a downloaded file with its checksum; delete it and raise PullError if it differs."""
    actual = sha256_of(partial)
    if actual != expected:
        partial.unlink()
        raise PullError(
            f"{origin}: the downloaded file's sha256 is {actual}, not {expected}; the download was "
            "deleted, and nothing else was changed"
        )


def no_space(error: OSError, partial: Path, left_bytes: int) -> PullError:
    """Return the error for a disk that became full."""
    return PullError(
        f"{partial.parent}: {error.strerror}: {left_bytes / 2**20:,.0f} MiB are still to be downloaded; free some "
        "space and repeat the command, which resumes the download"
    )


def is_full(error: OSError) -> bool:
    """Return whether the error means a full disk, or a limit on file sizes or quotas."""
    return error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextlib.contextmanager
def locked(partial: Path) -> Iterator[None]:
    """Hold a lock on the partial file (made if needed) until the process ends. Raises PullError if another holds it."""
    with partial.open("ab") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise PullError(
                f"{partial}: another process is downloading this file; wait until it has finished"
            ) from error
        yield


class FitOptions(msgspec.Struct, frozen=True):
    """The device and the sizes that a model must fit. `force`: pull the model even if it does not fit."""

    device: Device
    context: int  # context length in tokens per sequence
    batch: int  # number of sequences
    force: bool = False


def is_present(name: str, root: Path, sha256: str) -> bool:
    """Return whether the model is installed, whole and with this hash. Raises ArtifactError for its name."""
    try:
        artifact = load_artifact(root / name)
    except ArtifactNotFound:
        check_name(name, root)
        return False
    if artifact.manifest.sha256 == sha256 and artifact.path.is_file():
        return True
    raise PullError(
        f"{artifact.folder}: another model has this name; choose another name with --name, or delete the folder"
    )


def check_disk(left_bytes: int, folder: Path, what: str) -> None:
    """Check that the remaining bytes fit on the disk. Raises PullError with the figures."""
    try:
        check_space(left_bytes + _SPARE_BYTES, folder)
    except ArtifactError as error:
        raise PullError(f"{what}: not enough space on the disk: {error}") from error


def describe_remote(first: bytes, file: RemoteFile) -> GgufFile | None:
    """Describe a file by its first bytes; None if the header needs more. Raises ArtifactError for other bytes."""
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
    """Return the memory that a model needs. Raises PullError, with figures and the next smaller of `others` that fits.

    `others`: further files of the model. `beside_bytes`: for its mmproj file, which must fit, too.
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
