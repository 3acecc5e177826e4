"""Folders of data: rights that keep other accounts out, and names that survive a power cut."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path


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
