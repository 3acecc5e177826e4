"""Data folders: permissions that keep other accounts out, names that survive a power cut, and atomic files. A file
written here is complete or absent, even if the process dies or the disk fills up meanwhile.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

_CHUNK_BYTES = 1 << 20


def is_shared(folder: Path, own: re.Pattern[str]) -> bool:
    """Return whether a folder is shared, as /tmp: sticky, as a new volume is, and with files that are not our `own`."""
    try:
        names = os.listdir(folder)  # noqa: PTH208 - names alone
        return bool(folder.stat().st_mode & stat.S_ISVTX) and not all(map(own.fullmatch, names))
    except OSError:
        return False


def close_to_others(folder: Path, own: re.Pattern[str]) -> Iterator[OSError]:
    """Remove the permissions of other accounts from a folder, our files in it, and everything below them, as earlier
    versions left some readable; yield an error for each file that fails. Files of other accounts, or names that are not
    our `own`, stay as they are, since it may be a home folder; links are not followed.
    """
    for path, folders, files, at in os.fwalk(folder, follow_symlinks=False):
        if Path(path) == folder:
            folders[:] = filter(own.fullmatch, folders)
            files[:] = filter(own.fullmatch, files)
        for name in (".", *folders, *files):
            try:
                _close_file(name, at)
            except OSError as error:
                yield OSError(error.errno, error.strerror, str(Path(path) / name))


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk. Raises OSError."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _close_file(name: str, folder: int) -> None:
    """Remove the permissions of other accounts from a file. Raises OSError."""
    found = os.lstat(name, dir_fd=folder)
    is_content = stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)  # links have a type of their own
    if not is_content or not found.st_mode & 0o077 or found.st_uid != os.geteuid():
        return
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.fchmod(file, stat.S_IMODE(os.fstat(file).st_mode) & 0o700)
    finally:
        os.close(file)


def file_version(path: Path) -> tuple[int, int, int] | None:
    """Return a value that changes when a file changes or is replaced by a rename; None if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def write_atomically(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a file by rename: a reader sees the old or the new content. OSError names the file, which is unchanged."""
    path.parent.mkdir(0o755 if mode & 0o077 else 0o700, parents=True, exist_ok=True)
    _put(_partial(path, mode, lambda file: file.write(content)), path)


def write_new(path: Path, content: bytes, mode: int) -> None:
    """Write a new file, or none at all: OSError names it, FileExistsError if it is there already."""
    partial = _partial(path, mode, lambda file: file.write(content))
    try:
        os.link(partial, path)
    except FileExistsError:
        raise
    except OSError:  # the file system has no hard links, as on a USB stick
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        _put(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def copy_atomically(source: Path, path: Path) -> None:
    """Copy a file of any size, as `write_atomically`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as file:
        _put(_partial(path, 0o644, lambda target: shutil.copyfileobj(file, target, _CHUNK_BYTES)), path)


def _put(partial: Path, path: Path) -> None:
    """Rename a complete file to `path`. Raises OSError, after removing the partial file, if that fails."""
    try:
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def _partial(path: Path, mode: int, fill: Callable[[IO[bytes]], object]) -> Path:
    """Write a complete, synced file beside `path`; return its path. Raises OSError, and then leaves no file."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".partial")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    partial = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            if mode != 0o600:  # new files have this mode already; the file system may refuse to change it
                os.fchmod(handle, mode)
            fill(file)
            file.flush()
            os.fsync(handle)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
    return partial
