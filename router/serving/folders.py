"""Folders of data: rights that keep other accounts out, names that survive a power cut, and files that are whole.

A file that is written here is whole or not there, whatever ends the process or fills the disk meanwhile.
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
    """Whether every account writes its own files there, as in /tmp. A new volume has such rights, too, and is empty.

    Args:
        own: names of our files.
    """
    try:
        names = os.listdir(folder)  # noqa: PTH208 - names alone
        return bool(folder.stat().st_mode & stat.S_ISVTX) and not all(map(own.fullmatch, names))
    except OSError:
        return False


def close_to_others(folder: Path, own: re.Pattern[str]) -> Iterator[OSError]:
    """Take the rights of other accounts from a folder, the files in it that are ours, and what is below them.

    Earlier versions left some files readable. What another account owns stays as it is; links are not followed.

    Args:
        own: names of our files. Others keep their rights: the folder may be a home folder.

    Yields:
        An error for each file whose rights cannot be changed.
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
    """Return when a file, or the names in a folder, are on the disk. Raises OSError."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _close_file(name: str, folder: int) -> None:
    """Raises OSError."""
    found = os.lstat(name, dir_fd=folder)
    is_content = stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)  # A link is not what it names.
    if not is_content or not found.st_mode & 0o077 or found.st_uid != os.geteuid():
        return
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.fchmod(file, stat.S_IMODE(os.fstat(file).st_mode) & 0o700)
    finally:
        os.close(file)


def file_version(path: Path) -> tuple[int, int, int] | None:
    """Return what changes with a file, also where a rename puts another one in its place; None: there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def write_atomically(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a file by rename, so that readers see the old content or the new one.

    Raises:
        OSError: It names the file, which is as it was; nothing is left beside it.
    """
    path.parent.mkdir(0o755 if mode & 0o077 else 0o700, parents=True, exist_ok=True)
    _put(_partial(path, mode, lambda file: file.write(content)), path)


def write_new(path: Path, content: bytes, mode: int) -> None:
    """Write a file that is not there yet.

    Raises:
        FileExistsError: It is; nothing was changed.
        OSError: It names the file, which is not there; nothing is left beside it.
    """
    partial = _partial(path, mode, lambda file: file.write(content))
    try:
        os.link(partial, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links, such as that of a USB stick
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
    """Rename a complete file. Raises OSError: `path` is as it was, and the partial file is gone."""
    try:
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def _partial(path: Path, mode: int, fill: Callable[[IO[bytes]], object]) -> Path:
    """Return a complete and synced file beside `path`. Raises OSError: there is none."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".partial")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    partial = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            if mode != 0o600:  # which it has already, also where the file system refuses a change
                os.fchmod(handle, mode)
            fill(file)
            file.flush()
            os.fsync(handle)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
    return partial
