"""The folder of uploaded files. Each is one file with a header of 4 KiB and the content. All methods block; one thread
uses them.

1. A file is written under the name of a draft, flushed to the disk and renamed: it exists completely or not at all.
2. A deleted file is overwritten with zeros before its name is removed. A file system that writes elsewhere
   (copy-on-write, or with a data journal) and the controller of a flash disk may keep the old blocks; only encryption
   protects against that.
3. Remains of a killed daemon (drafts, files that were half overwritten) are erased at the start.
4. A file with an unreadable header, damaged or of a newer version, is set aside as ID.EXPIRES.unreadable until it
   expires (s of the device's own time); a version that can read it restores it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from pathlib import Path

import msgspec

from causeway_server.router.parts.uploads import PREFIX
from causeway_server.router.serving.folders import sync, write_atomically
from causeway_server.router.types import Prefer

from ..clock import ClockMark

log = logging.getLogger(__name__)

HEADER_BYTES = 4096
_CLOCK = "clock.json"
_DRAFT = ".draft"
_UNREADABLE = ".unreadable"
_PIECE_BYTES = 1024 * 1024
_ZEROS = bytes(_PIECE_BYTES)


class DeviceFile(msgspec.Struct, frozen=True, kw_only=True):
    """The header of an uploaded file. `created_unix`: Unix seconds, for display; `expires`: device time, seconds.

    `tags`, `prefer`: the hints of the upload, which apply to every request that names the file.
    """

    id: str
    owner: str
    filename: str
    purpose: str
    bytes: int
    sha256: str
    created_unix: float
    expires: float
    tags: tuple[str, ...] = ()
    prefer: Prefer | None = None


class FileFolder:
    """The files in `path`. Every method raises OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self) -> tuple[list[DeviceFile], list[str], ClockMark | None]:
        """Create the folder if it is missing and erase the remains of a killed daemon (3).

        Returns:
            The files in it, the names of unreadable ones that are not set aside yet (4), and the last recorded time.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._take_back()
        files, unreadable = [], []
        for path in sorted(self.path.iterdir()):
            if path.name == _CLOCK or path.name.endswith(_UNREADABLE) or not path.is_file():
                continue
            file = None if path.name.endswith(_DRAFT) else _read_header(path)
            if file is not None and file.id == path.name and path.stat().st_size == HEADER_BYTES + file.bytes:
                files.append(file)
            elif file is None and path.name.startswith(PREFIX) and not path.name.endswith(_DRAFT) and _has_header(path):
                unreadable.append(path.name)
            else:
                self._erase(path)
        return files, unreadable, self._read_mark()

    def _take_back(self) -> None:
        """Restore the names of files that were set aside and can be read now. (4)"""
        for path in self.path.glob(f"*{_UNREADABLE}"):
            if _read_header(path) is not None:
                path.replace(path.with_name(path.name.partition(".")[0]))
                sync(self.path)

    def set_aside(self, name: str, expires: float) -> None:
        """Set a file aside until `expires`, s of the device's own time. (4)"""
        path = self.path / name
        path.replace(path.with_name(f"{name}.{int(expires)}{_UNREADABLE}"))
        sync(self.path)

    def sweep_aside(self, now: float) -> int:
        """Erase the files that were set aside and have expired; return how many are left. (4)"""
        left = 0
        for path in sorted(self.path.glob(f"*{_UNREADABLE}")):
            expires = path.name.removesuffix(_UNREADABLE).rpartition(".")[2]
            if expires.isdecimal() and int(expires) > now:
                left += 1
            else:
                self._erase(path)
        return left

    def begin(self, name: str) -> Draft:
        """Begin a file, and return its draft."""
        return Draft(self.path / f"{name}{_DRAFT}")

    def publish(self, draft: Draft, file: DeviceFile, mark: ClockMark) -> None:
        """Give a draft its header and its name; when this returns, the file survives a power cut (1)."""
        header = msgspec.json.encode(file)
        assert len(header) < HEADER_BYTES
        draft.finish(header)
        self.write_mark(mark)
        draft.path.replace(self.path / file.id)
        sync(self.path)

    def discard(self, draft: Draft) -> None:
        """Erase a draft."""
        draft.close()
        if draft.path.exists():
            self._erase(draft.path)

    def read(self, file: DeviceFile) -> bytes | None:
        """Return the bytes of a file; None if they are damaged or missing."""
        try:
            with (self.path / file.id).open("rb") as opened:
                opened.seek(HEADER_BYTES)
                data = opened.read(file.bytes + 1)
        except FileNotFoundError:
            return None
        return data if hashlib.sha256(data).hexdigest() == file.sha256 else None

    def delete(self, name: str) -> None:
        """Erase a file (2). When this returns, the deletion survives a power cut."""
        path = self.path / name
        if path.exists():
            self._erase(path)

    def write_mark(self, mark: ClockMark) -> None:
        """Record the time: after a restart the device's own time continues from it."""
        write_atomically(self.path / _CLOCK, msgspec.json.encode(mark), 0o600)

    def _read_mark(self) -> ClockMark | None:
        try:
            return msgspec.json.decode((self.path / _CLOCK).read_bytes(), type=ClockMark)
        except (FileNotFoundError, msgspec.DecodeError, ValueError):
            return None

    def _erase(self, path: Path) -> None:
        try:
            _overwrite(path)
        except OSError as error:  # the name is removed in any case
            log.warning("An uploaded file was deleted without being overwritten: %s", error.strerror)
        path.unlink()
        sync(self.path)


class Draft:
    """A file that is being written; it is created with its first bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def write(self, data: bytes) -> None:
        """Append bytes."""
        if self._file is None:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            _write_all(self._file, bytes(HEADER_BYTES))
        _write_all(self._file, data)
        self._digest.update(data)

    def finish(self, header: bytes) -> None:
        """Write the header, and flush everything to the disk."""
        assert self._file is not None
        os.pwrite(self._file, header, 0)
        os.fsync(self._file)
        self.close()

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            os.close(file)


def _write_all(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def _read_header(path: Path) -> DeviceFile | None:
    """Return the header; None if it is damaged, of another version, or overwritten."""
    with contextlib.suppress(OSError, msgspec.DecodeError, ValueError), path.open("rb") as opened:
        return msgspec.json.decode(opened.read(HEADER_BYTES).rstrip(b"\0"), type=DeviceFile)
    return None


def _has_header(path: Path) -> bool:
    """Return whether the file has a header, readable or not. The header is overwritten first, and written last."""
    with path.open("rb") as opened:
        return any(opened.read(HEADER_BYTES))


def _overwrite(path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b", buffering=0) as opened:
        while size > 0:
            size -= opened.write(_ZEROS[: min(size, _PIECE_BYTES)]) or 0
        os.fsync(opened.fileno())
