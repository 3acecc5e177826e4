"""The folder of uploaded files. Each is one file with a header of 4 KiB and the content, both encrypted, the content in
pieces. All methods block; one thread uses them.

1. A file is written under the name of a draft, flushed to the disk and renamed: it exists completely or not at all.
2. A deleted file is overwritten with zeros before its name is removed. A file system that writes elsewhere
   (copy-on-write, or with a data journal) and the controller of a flash disk may keep the old, encrypted blocks.
3. Remains of a killed daemon (drafts, files that were half overwritten) are erased at the start.
4. A file with an unreadable header, damaged or of a newer version, is set aside as ID.EXPIRES.unreadable until it
   expires (s of the device's own time); a version that can read it restores it.
5. Files of earlier versions, which are not encrypted, are encrypted when the folder is opened; damaged ones are erased.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from pathlib import Path

import msgspec

from causeway_server.router.parts.uploads import PREFIX
from causeway_server.router.serving.at_rest.state_keys import StateKeys
from causeway_server.router.serving.folders import sync, write_atomically
from causeway_server.router.types import Prefer

from ..clock import ClockMark
from ..storage.sealed import LENGTH, erase, packed, replace_erased, unpacked

log = logging.getLogger(__name__)

HEADER_BYTES = 4096
_CLOCK = "clock.json"
_DRAFT = ".draft"
_UNREADABLE = ".unreadable"
_PIECE_BYTES = 1024 * 1024
_PLACE = "file"


class DeviceFile(msgspec.Struct, frozen=True, kw_only=True):
    """The header of an uploaded file. `created_unix`: Unix seconds, for display; `expires`: device time, seconds;
    `tags`, `prefer`: the hints of the upload, which apply to every request that names the file.
    """

    id: str
    owner: str
    filename: str
    purpose: str
    bytes: int
    stored_bytes: int = 0  # of the encrypted content
    sha256: str
    created_unix: float
    expires: float
    tags: tuple[str, ...] = ()
    prefer: Prefer | None = None


class FileFolder:
    """The files in `path`, encrypted with `keys`. Every method raises OSError."""

    def __init__(self, path: Path, keys: StateKeys) -> None:
        self.path = path
        self._keys = keys

    def open(self) -> tuple[list[DeviceFile], list[str], ClockMark | None]:
        """Create a missing folder; erase the remains of a killed daemon (3). Return the files in it, the names of
        unreadable ones that are not set aside yet (4), and the last recorded time.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._take_back()
        files, unreadable = [], []
        for path in sorted(self.path.iterdir()):
            if path.name == _CLOCK or path.name.endswith(_UNREADABLE) or not path.is_file():
                continue
            if not path.name.endswith(_DRAFT) and not self._encrypt(path):
                continue
            file = None if path.name.endswith(_DRAFT) else self._read_header(path)
            if file is not None and file.id == path.name and path.stat().st_size == HEADER_BYTES + file.stored_bytes:
                files.append(file)
            elif file is None and path.name.startswith(PREFIX) and not path.name.endswith(_DRAFT) and _has_header(path):
                unreadable.append(path.name)
            else:
                self._erase(path)
        return files, unreadable, self._read_mark()

    def _take_back(self) -> None:
        """Restore the names of files set aside that can be read now (4); erase those of earlier versions. (5)"""
        for path in self.path.glob(f"*{_UNREADABLE}"):
            if _is_plain(path):
                self._erase(path)
            elif self._read_header(path) is not None:
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
        return Draft(self.path / f"{name}{_DRAFT}", name, self._keys)

    def publish(self, draft: Draft, file: DeviceFile, mark: ClockMark) -> None:
        """Give a draft its header and its name; when this returns, the file survives a power cut (1)."""
        draft.finish(file)
        self.write_mark(mark)
        draft.path.replace(self.path / file.id)
        sync(self.path)

    def discard(self, draft: Draft) -> None:
        draft.close()
        if draft.path.exists():
            self._erase(draft.path)

    def read(self, file: DeviceFile) -> bytes | None:
        """Return the bytes of a file; None if they are damaged or missing."""
        data, number = bytearray(), 0
        try:
            with (self.path / file.id).open("rb") as opened:
                opened.seek(HEADER_BYTES)
                while size := opened.read(LENGTH.size):
                    if len(size) < LENGTH.size or len(data) >= file.bytes:
                        return None
                    data += self._keys.open(opened.read(*LENGTH.unpack(size)), _PLACE, file.id, number)
                    number += 1
        except FileNotFoundError:
            return None
        return bytes(data) if hashlib.sha256(data).hexdigest() == file.sha256 else None

    def reseal(self) -> int:
        """Encrypt the files with the newest key whose key is an old one; return their number, with that of drafts."""
        count = 0
        for path in sorted(self.path.glob(f"{PREFIX}*")):
            if path.name.endswith(_DRAFT):  # its first pieces may have an old key
                count += 1
                continue
            file = None if path.suffix else self._read_header(path)
            with path.open("rb") as opened:
                opened.seek(HEADER_BYTES + LENGTH.size)
                is_current = opened.read(len(self._keys.head)) == self._keys.head
            data = None if file is None or is_current else self.read(file)
            if file is not None and data is not None:
                self._rewrite(file, data)
                count += 1
        return count

    def _encrypt(self, path: Path) -> bool:
        """Encrypt a file of an earlier version. Return False if it was erased. (5)"""
        content = path.read_bytes() if _is_plain(path) else b""
        if not content:
            return True
        with contextlib.suppress(msgspec.DecodeError, ValueError):
            file = msgspec.json.decode(content[:HEADER_BYTES].rstrip(b"\0"), type=DeviceFile)
            data = content[HEADER_BYTES:]
            if file.id == path.name and hashlib.sha256(data).hexdigest() == file.sha256:
                self._rewrite(file, data)
                return True
        log.warning("The uploaded file %s was damaged, and was erased, because it was not encrypted.", path.name)
        self._erase(path)
        return False

    def _rewrite(self, file: DeviceFile, data: bytes) -> None:
        """Replace a file by the same one under the newest key."""
        draft = self.begin(file.id)
        draft.path.unlink(missing_ok=True)
        for start in range(0, len(data), _PIECE_BYTES):
            draft.write(data[start : start + _PIECE_BYTES])
        draft.finish(file)
        replace_erased(draft.path, self.path / file.id)

    def _read_header(self, path: Path) -> DeviceFile | None:
        """Return the header; None if it is damaged, of another version, or overwritten."""
        with contextlib.suppress(msgspec.DecodeError, ValueError), path.open("rb") as opened:
            header = unpacked(opened.read(HEADER_BYTES))
            return msgspec.json.decode(self._keys.open(header, _PLACE, path.name.partition(".")[0]), type=DeviceFile)
        return None

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
            erase(path)
        except OSError as error:  # the name is removed in any case
            log.warning("An uploaded file was deleted without being overwritten: %s", error.strerror)
            path.unlink()
            sync(self.path)


class Draft:
    """A file that is being written; it is created with its first bytes."""

    def __init__(self, path: Path, name: str, keys: StateKeys) -> None:
        self.path = path
        self._name = name
        self._keys = keys
        self._pieces = 0
        self._stored_bytes = 0
        self._file: int | None = None
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def write(self, data: bytes) -> None:
        if self._file is None:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            _write_all(self._file, bytes(HEADER_BYTES))
        sealed = packed(self._keys.seal(data, _PLACE, self._name, self._pieces))
        _write_all(self._file, sealed)
        self._pieces += 1
        self._stored_bytes += len(sealed)
        self._digest.update(data)

    def finish(self, file: DeviceFile) -> None:
        """Write the header, and flush everything to the disk."""
        assert self._file is not None
        header = msgspec.json.encode(msgspec.structs.replace(file, stored_bytes=self._stored_bytes))
        header = packed(self._keys.seal(header, _PLACE, self._name))
        assert len(header) < HEADER_BYTES
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


def _has_header(path: Path) -> bool:
    """Return whether the file has a header, readable or not. The header is overwritten first, and written last."""
    with path.open("rb") as opened:
        return any(opened.read(HEADER_BYTES))


def _is_plain(path: Path) -> bool:
    with path.open("rb") as opened:
        return opened.read(2) == b'{"'  # which no length of a header is
