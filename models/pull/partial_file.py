"""A file that is being downloaded: its place, its checksum, its lock, and the error of a full disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
from collections.abc import Iterator
from pathlib import Path

from ..catalog.artifact import sha256_of
from .sources import PullError


def partial_of(target: Path) -> Path:
    return target.with_name(f"{target.name}.partial")


def check_sha256(partial: Path, expected: str, origin: str) -> None:
    """Compare a downloaded file with its checksum, and delete it if it differs.

    Raises:
        PullError: it differs.
    """
    actual = sha256_of(partial)
    if actual != expected:
        partial.unlink()
        raise PullError(
            f"{origin}: the downloaded file's sha256 is {actual}, not {expected}: the download was deleted, "
            "nothing else was changed"
        )


def no_space(error: OSError, partial: Path, left_bytes: int) -> PullError:
    """Return the error for a disk that became full."""
    return PullError(
        f"{partial.parent}: {error.strerror}: {left_bytes / 2**20:,.0f} MiB are still to come; free some space and "
        "repeat the command, which resumes"
    )


def is_full(error: OSError) -> bool:
    """Return whether the error is a full disk, or a limit on files."""
    return error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextlib.contextmanager
def locked(partial: Path) -> Iterator[None]:
    """Hold a lock on the part, which is created. The lock ends with the process.

    Raises:
        PullError: another process holds it.
    """
    with partial.open("ab") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise PullError(f"{partial}: another process is downloading this file; wait for it") from error
        yield
