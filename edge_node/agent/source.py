"""Sources of updates: a folder, or the control plane with files imported from a medium.

Downloads are resumed, and are limited in size, time and rate.
"""

from __future__ import annotations

import asyncio
import errno
import shutil
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Protocol

import msgspec

from causeway_server.router.bundle.manifest import Blob
from causeway_server.router.bundle.refusals import DiskFull, DownloadTooSlow, EndlessData, UpdateUnavailable

from .store import Disk

CHUNK_BYTES = 256 * 1024
_WRITE_BYTES = 1024 * 1024
IMPORT, WANTED = "import", "wanted"
_AWAY_S = 60.0


class Source(Protocol):
    """The published files of a fleet."""

    def fetch(self, path: str, offset: int = 0) -> AsyncIterator[bytes]:
        """Yield a file from `offset` on, such as ``tuf/metadata/timestamp.json`` or ``blobs/SHA256``. Raises
        FileNotFoundError; OSError if the source does not answer, or the transfer breaks off.
        """
        ...


class FolderSource:
    """A folder as published by a fleet, for example on a USB stick."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def fetch(self, path: str, offset: int = 0) -> AsyncIterator[bytes]:
        file = await asyncio.to_thread((self._folder / path).open, "rb")
        try:
            file.seek(offset)
            while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
                yield chunk
        finally:
            file.close()


class DownloadBounds(msgspec.Struct, frozen=True):
    """Limits of an update's download: its total duration, and each blob's minimum rate after `grace_s`."""

    deadline_s: float = 6 * 3600.0
    grace_s: float = 30.0
    least_bytes_per_s: float = 4096.0


class Download:
    """Downloads blobs into partial files. Existing content is kept, also over restarts and failed attempts."""

    def __init__(self, source: Source, disk: Disk, bounds: DownloadBounds, monotonic: Callable[[], float]) -> None:
        self._source = source
        self._disk = disk
        self._bounds = bounds
        self._monotonic = monotonic
        self._deadline = monotonic() + bounds.deadline_s

    async def fetch(self, blob: Blob, partial: Path) -> None:
        """Complete a partial file. Its content is not verified.

        Raises:
            UpdateUnavailable, DownloadTooSlow: The received bytes are kept.
            EndlessData: The partial file is removed.
            DiskFull: The received bytes are kept.
        """
        try:
            await self._fetch(blob, partial)
        except OSError as error:
            raise disk_refusal(error, str(partial)) from error

    async def _fetch(self, blob: Blob, partial: Path) -> None:
        offset = _size(partial)
        if offset > blob.size_bytes:
            self._disk.remove(partial)
            offset = 0
        if offset == 0:
            self._disk.create(partial, b"")
        waiting = bytearray()
        try:
            async for chunk in self._chunks(blob, offset):
                waiting += chunk
                offset += len(chunk)
                if offset > blob.size_bytes:
                    waiting.clear()
                    self._disk.remove(partial)
                    raise EndlessData(
                        f"Blob {blob.sha256}: the source sent more than the blob's {blob.size_bytes} bytes."
                    )
                if len(waiting) >= _WRITE_BYTES:
                    await asyncio.to_thread(self._disk.append, partial, bytes(waiting))
                    waiting.clear()
        finally:
            if waiting:
                self._disk.append(partial, bytes(waiting))
        if offset < blob.size_bytes:
            raise UpdateUnavailable(f"Blob {blob.sha256}: the source ended after {offset} of {blob.size_bytes} bytes.")

    async def _chunks(self, blob: Blob, offset: int) -> AsyncIterator[bytes]:
        """Yield chunks from the source until the blob is complete. Raises DownloadTooSlow below the minimum rate."""
        if offset == blob.size_bytes:
            return
        path, began, received = f"blobs/{blob.sha256}", self._monotonic(), 0
        bounds = self._bounds
        async with aclosing(generator(self._source.fetch(path, offset))) as chunks:
            while True:
                slow_at = began + bounds.grace_s + received / bounds.least_bytes_per_s
                left_s = min(slow_at, self._deadline) - self._monotonic()
                try:
                    if left_s <= 0.0:  # also for a source that always has the next chunk ready
                        raise TimeoutError
                    async with asyncio.timeout(left_s):
                        chunk = await anext(chunks, b"")
                except TimeoutError as error:
                    raise DownloadTooSlow(
                        f"{path}: only {received} bytes arrived in {self._monotonic() - began:.0f} s; the minimum "
                        f"rate is {bounds.least_bytes_per_s:g} bytes/s."
                    ) from error
                except OSError as error:
                    raise UpdateUnavailable(f"{path}: {error}") from error
                if not chunk:
                    return
                received += len(chunk)
                yield chunk


def disk_refusal(error: OSError, where: str) -> DiskFull:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return DiskFull(f"{where}: {'the disk is full' if full else error.strerror or error}")


async def generator(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    """Yield the non-empty chunks, so that b"" can mark the end. `aclose` closes the source's generator, too."""
    try:
        async for chunk in chunks:
            if chunk:
                yield chunk
    finally:
        if (close := getattr(chunks, "aclose", None)) is not None:
            await close()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


class SourceWithImport:
    """The control plane's files, or imported ones while it is unreachable; imported blobs first: they are local."""

    def __init__(self, plane: Source, folder: Path, monotonic: Callable[[], float]) -> None:
        self._plane = plane
        self._folder = folder / IMPORT
        self._monotonic = monotonic
        self._away_until = float("-inf")

    async def fetch(self, path: str, offset: int = 0) -> AsyncGenerator[bytes]:
        """Yield a file from `offset` on. Raises FileNotFoundError, OSError."""
        here = self._here(path)
        if here and (path.startswith("blobs/") or self._monotonic() < self._away_until):
            async for chunk in FolderSource(self._folder).fetch(path, offset):
                yield chunk
            return
        if self._monotonic() < self._away_until and self.stamp:
            raise FileNotFoundError(f"The imported medium has no {path}.")
        begun = False
        try:
            async for chunk in self._plane.fetch(path, offset):
                begun = True
                yield chunk
            return
        except FileNotFoundError:
            raise
        except OSError:
            if begun or not self.stamp:
                raise
            self._away_until = self._monotonic() + _AWAY_S  # do not wait for a timeout for each file
        if not here:
            raise FileNotFoundError(f"The imported medium has no {path}.")
        async for chunk in FolderSource(self._folder).fetch(path, offset):
            yield chunk

    @property
    def stamp(self) -> int:
        """Return a number that changes with each import; 0 if nothing is imported."""
        try:
            return (self._folder / WANTED).stat().st_mtime_ns
        except OSError:
            return 0

    @property
    def wanted(self) -> str | None:
        """Return the bundle that the imported plan assigns."""
        try:
            return (self._folder / WANTED).read_text() or None
        except OSError:
            return None

    def remove(self) -> None:
        """Delete the imported files, which the device has installed."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _here(self, path: str) -> bool:
        return ".." not in path and (self._folder / path).is_file()
