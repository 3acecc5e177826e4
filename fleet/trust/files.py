"""Files that are whole or not there, whatever ends the process or fills the disk meanwhile."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

_CHUNK_BYTES = 1 << 20


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file by rename, so that readers see the old content or the new one.

    Raises:
        OSError: It names the file, which is as it was; nothing is left beside it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_partial(path, content, 0o644).replace(path)


def write_new(path: Path, content: bytes, mode: int) -> None:
    """Write a file that is not there yet.

    Raises:
        FileExistsError: It is; nothing was changed.
        OSError: It names the file, which is not there; nothing is left beside it.
    """
    partial = _write_partial(path, content, mode)
    try:
        os.link(partial, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links, such as that of a USB stick
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def copy_atomically(source: Path, path: Path) -> None:
    """Copy a file of any size, as `write_atomically`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as file:
        _partial(path, 0o644, lambda target: shutil.copyfileobj(file, target, _CHUNK_BYTES)).replace(path)


def close_to_others(folder: Path, own: re.Pattern[str]) -> None:
    """Take the rights of other accounts from a folder and the files in it that are ours.

    Earlier versions left some files readable. What another account owns stays as it is; links are not followed.

    Args:
        folder: A folder of data.
        own: Names of our files. Others keep their rights: the folder may be a home folder.

    Raises:
        OSError: A file cannot be changed, or the folder is one of all accounts, such as /tmp.
    """
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        names = os.listdir(at)  # noqa: PTH208 - of the open folder
        ours = list(filter(own.fullmatch, names))
        # A new volume of a container is sticky, too, and empty.
        if os.fstat(at).st_mode & stat.S_ISVTX and len(ours) < len(names):
            raise OSError(errno.EPERM, "a folder of all accounts", str(folder))
        for name in (".", *ours):
            found = os.lstat(name, dir_fd=at)
            is_content = stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)
            if is_content and found.st_mode & 0o077 and found.st_uid == os.geteuid():
                _close_file(name, at)
    finally:
        os.close(at)


def _close_file(name: str, folder: int) -> None:
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.fchmod(file, stat.S_IMODE(os.fstat(file).st_mode) & 0o700)
    finally:
        os.close(file)


def _write_partial(path: Path, content: bytes, mode: int) -> Path:
    return _partial(path, mode, lambda file: file.write(content))


def _partial(path: Path, mode: int, fill: Callable[[IO[bytes]], object]) -> Path:
    """Return a complete and synced file beside `path`. Raises OSError: there is none."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".partial")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    partial = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(handle, mode)
            fill(file)
            file.flush()
            os.fsync(handle)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
    return partial
