"""Import of updates from a medium, without a network: a folder, tar or zip with `tuf/` and `blobs/` as published.

    STATE_DIR/fleet/import/    tuf/…, and the missing blobs of this device's bundle
    .../wanted    the bundle that the plan on the medium assigns to this device

The medium is verified like the network before a file is copied, and the agent verifies it again. Only blobs that signed
metadata names are copied, up to their signed size.
"""

from __future__ import annotations

import _strptime  # type: ignore[import-not-found]  # noqa: F401 -- as those below: loaded before root takes other rights
import bz2  # noqa: F401
import errno
import hashlib
import lzma  # noqa: F401
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import IO

import msgspec
import tuf.api.serialization.json  # noqa: F401

from causeway_server.router.bundle.manifest import Blob
from causeway_server.router.bundle.refusals import BundleAltered, DiskFull, EndlessData, UpdateUnavailable

from ... import daemon_version
from ..inspection import UpdateCheckRequest, UpdateCheckResult
from ..source import IMPORT, WANTED
from ..verifier import check_updates
from .identity import Identity

_CHUNK = 1 << 20
_MAX_METADATA_BYTES, _MAX_METADATA_FILES = 4 << 20, 2000
_MAX_NAMES = 100_000
_MARK = "tuf/metadata/timestamp.json"
Open = Callable[[], IO[bytes]]


class Imported(msgspec.Struct, frozen=True):
    """The result of an import. `wanted` None: no plan for this device's cohort, or the factory files."""

    wanted: str | None
    serial: int = 0
    blobs: int = 0


class ImportFailed(Exception):
    """The file is not an update medium."""


def import_medium(folder: Path, medium: Path, identity: Identity, running: str | None) -> Imported:
    """Verify a medium, a folder or an archive, and copy the files that this device needs to `folder`, STATE_DIR/fleet,
    for its agent.

    Args:
        running: The bundle that the device runs; None for the factory files.
    Raises:
        ImportFailed: The path is neither a folder nor an archive with `tuf/metadata`.
        UpdateRefused: The verification failed; the subclass names the reason.
        OSError: The medium cannot be read, or the device's disk cannot be written.
    """
    place = folder / f"{IMPORT}.partial"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    try:
        with _files(medium) as files:
            metadata = [name for name in files if name.startswith("tuf/")]
            if len(metadata) > _MAX_METADATA_FILES:
                raise EndlessData(f"The medium has {len(metadata)} metadata files, which is too many.")
            for name in metadata:
                _copy(files[name], place / name, _MAX_METADATA_BYTES)
            result = _verify(folder, place, identity, running)
            needed = () if result.manifest is None else result.manifest.blobs
            blobs = [blob for blob in needed if not (folder / "store" / "blobs" / blob.sha256).exists()]
            for blob in blobs:
                _copy_blob(files, blob, place)
        serial = 0 if result.manifest is None else result.manifest.serial
        (place / WANTED).write_text(result.wanted or "")
        target = folder / IMPORT
        shutil.rmtree(target, ignore_errors=True)
        place.rename(target)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return Imported(result.wanted, serial, len(blobs))


def _verify(folder: Path, place: Path, identity: Identity, running: str | None) -> UpdateCheckResult:
    """Verify the medium against a copy of the agent's metadata: it is undisturbed, older versions are refused."""

    def fetch(path: str) -> Iterator[bytes]:
        yield (place / path).read_bytes()

    with tempfile.TemporaryDirectory(dir=folder, prefix="import-") as scratch:
        known = Path(scratch) / "tuf"
        if (folder / "tuf").is_dir():
            shutil.copytree(folder / "tuf", known)
        request = UpdateCheckRequest(
            folder=str(known),
            root=identity.root.encode(),
            device=identity.device,
            cohort=identity.cohort,
            running=running,
            known=(),
            daemon_version=daemon_version(),
            not_before=0.0,
        )
        return check_updates(request, fetch, lambda: 0.0)


def _copy_blob(files: Mapping[str, Open], blob: Blob, place: Path) -> None:
    name = f"blobs/{blob.sha256}"
    if name not in files:
        raise UpdateUnavailable(f"The medium has no {name}, which this device needs.")
    if _copy(files[name], place / name, blob.size_bytes) != blob.sha256:
        raise BundleAltered(f"{name} on the medium differs from the signed content.")


def _copy(opened: Open, target: Path, most_bytes: int) -> str:
    """Copy a file; return its SHA-256."""
    target.parent.mkdir(parents=True, exist_ok=True)
    digest, copied = hashlib.sha256(), 0
    try:
        with opened() as source, target.open("wb") as output:
            while chunk := source.read(_CHUNK):
                copied += len(chunk)
                if copied > most_bytes:
                    raise EndlessData(f"{target.name} on the medium has more than {most_bytes} bytes.")
                digest.update(chunk)
                output.write(chunk)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"{target}: the disk is full.") from error
        raise
    return digest.hexdigest()


# --- the medium ------------------------------------------------------------------------------------------------------


@contextmanager
def _files(medium: Path) -> Iterator[Mapping[str, Open]]:
    """Yield the files of a medium by their published name. Raises ImportFailed."""
    with ExitStack() as stack:
        try:
            named = dict(islice(_named(medium, stack), _MAX_NAMES))
        except (tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
            # the other exceptions are those of the codecs
            first = (str(error).splitlines() or ["it is truncated"])[0].removesuffix(":")
            raise ImportFailed(f"{medium} is neither a folder nor a tar or zip archive: {first}.") from error
        roots = [name.removesuffix(_MARK) for name in named if name.endswith(_MARK)]
        if not roots:
            raise ImportFailed(f"{medium} does not contain {_MARK}.")
        root = min(roots, key=len)
        yield {name.removeprefix(root): opened for name, opened in named.items() if name.startswith(root)}


def _named(medium: Path, stack: ExitStack) -> Iterator[tuple[str, Open]]:
    """Yield only regular files whose names contain no `..`."""
    if medium.is_dir():
        for path in sorted(medium.rglob("*")):
            if path.is_file() and not path.is_symlink():
                yield path.relative_to(medium).as_posix(), partial(_opened, path)
    elif zipfile.is_zipfile(medium):
        zipped = stack.enter_context(zipfile.ZipFile(medium))
        for entry in zipped.infolist():
            if not entry.is_dir() and _stays_inside(entry.filename):
                yield PurePosixPath(entry.filename).as_posix(), partial(zipped.open, entry)
    else:
        tarred = stack.enter_context(tarfile.open(medium))  # noqa: SIM115 -- the stack closes it
        for member in tarred:
            if member.isfile() and _stays_inside(member.name):
                yield PurePosixPath(member.name).as_posix(), partial(_extracted, tarred, member)


def _opened(path: Path) -> IO[bytes]:
    return path.open("rb")


def _extracted(archive: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    file = archive.extractfile(member)
    assert file is not None, "it is a regular file"
    return file


def _stays_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\\" not in name
