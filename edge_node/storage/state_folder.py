"""The state folder: its lock, and that no other account can read it.

One daemon per folder: two daemons would overwrite each other's files. The kernel holds the lock (flock(2)) as long as
the process lives, so a killed daemon leaves none behind.

A database's name has the number of its layout. One of a newer version is left alone, and named as a problem.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from router.errors import ConfigError

log = logging.getLogger(__name__)

FILE = "lock"


_DATABASE = re.compile(r"([a-z]+)-([0-9]{1,6})\.sqlite")
# What versions of the daemon have in the folder. Other files keep their rights: somebody may have named a home folder.
_OURS = re.compile(rf"{_DATABASE.pattern}.*|{FILE}|policy\.last-good\.yaml.*|files|prompts|fleet(\.left)?|run")


class StateFolderLock:
    """The lock of `folder`, which is created if it is missing; None: no state folder, no lock.

    Args:
        databases: The names of this version's databases, such as `jobs-2.sqlite`.
    """

    def __init__(self, folder: Path | None, databases: Iterable[str] = ()) -> None:
        self._folder = folder
        self._file: int | None = None
        self._layouts = {match[1]: int(match[2]) for match in map(_DATABASE.fullmatch, databases) if match}
        self.problems: tuple[str, ...] = ()
        """Databases of newer versions, as of the start."""

    @property
    def folder(self) -> Path | None:
        return self._folder

    def acquire(self) -> None:
        """Lock the folder until `release` or the end of the process.

        A folder that cannot be locked because it is read-only or the disk is full is used without a lock: the daemon
        answers from memory then.

        Raises:
            ConfigError: another daemon uses the folder, or it is one that all accounts share.
        """
        if self._folder is None or self._file is not None:
            return
        if _is_shared(self._folder):
            raise ConfigError(
                f"{self._folder} is a folder of all accounts. Give the daemon one of its own with --state-dir.",
                where="state_dir",
            )
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            close_to_others(self._folder)
            file = os.open(self._folder / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            log.warning("the state folder %s cannot be locked: %s", self._folder, error.strerror)
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(file, 32, 0).decode(errors="replace").strip()
            os.close(file)
            process = f" (process {owner})" if owner else ""
            raise ConfigError(
                f"another daemon{process} uses the folder {self._folder}; stop it, or give this one a folder of its "
                "own with --state-dir",
                where="state_dir",
            ) from None
        except OSError as error:  # a file system without locks
            os.close(file)
            log.warning("the state folder %s cannot be locked: %s", self._folder, error.strerror)
            return
        self._file = file
        self._write_pid(file)
        self.problems = tuple(self._newer_databases(self._folder))
        for problem in self.problems:
            log.warning("%s", problem)

    def _newer_databases(self, folder: Path) -> Iterator[str]:
        for path in sorted(folder.iterdir()):
            match = _DATABASE.fullmatch(path.name)
            known = self._layouts.get(match[1]) if match else None
            if match and known is not None and int(match[2]) > known:
                yield (
                    f"{path} is of a newer version of the daemon: this one uses {match[1]}-{known}.sqlite and leaves "
                    "it as it is; what it holds is there again after an upgrade"
                )

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write_pid(self, file: int) -> None:
        """For the message of the daemon that is refused."""
        try:
            os.ftruncate(file, 0)
            os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            log.warning("the process id cannot be written to the lock of %s: %s", self._folder, error.strerror)


def _is_shared(folder: Path) -> bool:
    """Whether every account writes its own files there, as in /tmp. A new volume has such rights, too, and is empty."""
    try:
        mode = folder.stat().st_mode
        if not (mode & stat.S_ISVTX and mode & stat.S_IWOTH):
            return False
        return any(not _OURS.fullmatch(name) for name in os.listdir(folder))  # noqa: PTH208 - names alone
    except OSError:
        return False


def close_to_others(folder: Path) -> None:
    """Take the rights of other accounts from a state folder and what is the daemon's in it.

    Earlier versions left some files readable.

    What another account owns and what cannot be changed stays as it is; links are not followed.
    """
    for path, folders, files, at in os.fwalk(folder, follow_symlinks=False):
        if Path(path) == folder:
            folders[:] = filter(_OURS.fullmatch, folders)
            files[:] = filter(_OURS.fullmatch, files)
        for name in (".", *folders, *files):
            try:
                if stat.S_IMODE(os.lstat(name, dir_fd=at).st_mode) & 0o077:
                    _close_file(name, at)
            except OSError as error:
                log.warning("the rights of %s in %s cannot be changed: %s", name, folder, error.strerror)


def _close_file(name: str, folder: int) -> None:
    """Raises OSError."""
    found = os.lstat(name, dir_fd=folder)
    if found.st_uid != os.geteuid() or not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        return  # A socket has no content; a link is not what it names.
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.fchmod(file, stat.S_IMODE(os.fstat(file).st_mode) & 0o700)
    finally:
        os.close(file)
