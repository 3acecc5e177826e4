"""The state folder: its lock, and its protection from other accounts.

One daemon per folder: two daemons would overwrite each other's files. The kernel holds the lock (flock(2)) as long as
the process lives, so a killed daemon leaves none behind.

A database's name contains the number of its layout. A database of a newer layout is left unchanged, and reported as a
problem.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from causeway_server.router.errors import ConfigError
from causeway_server.router.serving.folders import close_to_others, is_shared

log = logging.getLogger(__name__)

FILE = "lock"
FLEET_FOLDER = "fleet"
_PARTIAL = "tmp*.partial"  # see `router.serving.folders`


_DATABASE = re.compile(r"([a-z]+)-([0-9]{1,6})\.sqlite")
# Files of all versions of the daemon in the folder. Other files keep their rights: it may be a home folder.
_OURS = re.compile(
    rf"{_DATABASE.pattern}.*|{FILE}|keys\.json|policy\.last-good\.yaml.*|(refits|variants)-1\.json|tmp\w+\.partial|files|"
    rf"prompts|egress|{FLEET_FOLDER}(\.left)?|run"
)


class StateFolderLock:
    """The lock of `folder`, which is created if missing; without a folder there is no lock. `databases`: the names of
    this version's databases, such as `jobs-3.sqlite`.
    """

    def __init__(self, folder: Path | None, databases: Iterable[str] = ()) -> None:
        self.folder = folder
        self._file: int | None = None
        self._layouts = {match[1]: int(match[2]) for match in map(_DATABASE.fullmatch, databases) if match}
        self.problems: tuple[str, ...] = ()
        """Databases of newer versions, found at the start."""

    def acquire(self) -> None:
        """Lock the folder until `release` or the end of the process. A folder that cannot be locked, read-only or on a
        full disk, is used without: the daemon then answers from memory. Raises ConfigError if another daemon uses it,
        or all accounts do.
        """
        if self.folder is None or self._file is not None:
            return
        if is_shared(self.folder, _OURS):
            raise ConfigError(
                f"{self.folder} is shared by all accounts. Give the daemon its own folder with --state-dir.",
                where="state_dir",
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for error in close_to_others(self.folder, _OURS):
                log.warning("The rights of %s cannot be changed: %s", error.filename, error.strerror)
            file = os.open(self.folder / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            log.warning("The state folder %s cannot be locked: %s", self.folder, error.strerror)
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(file, 32, 0).decode(errors="replace").strip()
            os.close(file)
            process = f" (process {owner})" if owner else ""
            raise ConfigError(
                f"Another daemon{process} uses the folder {self.folder}. Stop it, or give this daemon its "
                "own folder with --state-dir.",
                where="state_dir",
            ) from None
        except OSError as error:  # a file system without locks
            os.close(file)
            log.warning("The state folder %s cannot be locked: %s", self.folder, error.strerror)
            return
        self._file = file
        self._write_pid(file)
        for left in (*self.folder.glob(_PARTIAL), *(self.folder / FLEET_FOLDER).glob(_PARTIAL)):
            with contextlib.suppress(OSError):  # a write that a crash or a power cut interrupted
                left.unlink()
        self.problems = tuple(self._newer_databases(self.folder))
        for problem in self.problems:
            log.warning("%s", problem)

    def _newer_databases(self, folder: Path) -> Iterator[str]:
        for path in sorted(folder.iterdir()):
            match = _DATABASE.fullmatch(path.name)
            known = self._layouts.get(match[1]) if match else None
            if match and known is not None and int(match[2]) > known:
                yield (
                    f"{path} belongs to a newer version of the daemon. This version uses "
                    f"{match[1]}-{known}.sqlite and leaves the newer file unchanged; its content is "
                    "available again after an upgrade"
                )

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write_pid(self, file: int) -> None:
        """Write the process id, for the message of a daemon that is refused."""
        try:
            os.ftruncate(file, 0)
            os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            log.warning("The process id cannot be written to the lock of %s: %s", self.folder, error.strerror)
