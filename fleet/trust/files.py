"""Files that are whole or not there, whatever ends the process or fills the disk meanwhile."""

from __future__ import annotations

import errno
import os
import shutil
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
