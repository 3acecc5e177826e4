"""Content in a folder that all gateways and workers share, such as an NFS mount: one folder per file.

A part is written beside its place, flushed to the disk and renamed, so that no reader sees half of one.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from anyio import to_thread

from router.errors import ConfigError
from router.serving.folders import sync

from ..errors import FileContentLost, FileStoreUnavailable
from .port import StoreName

_log = logging.getLogger("causeway.cloud.files")
_RETRY_AFTER_S = 30.0
_MARKER = ".causeway-files"
"""Without it the folder is not the one that it was at the start: it is not mounted, which loses nothing."""
T = TypeVar("T")


class PathContent:
    """A ContentStore in `folder`."""

    name: Final[StoreName] = "path"

    def __init__(self, folder: str) -> None:
        """Raises ConfigError if `folder` is no folder in which this process may write."""
        self._root = Path(folder)
        try:
            (self._root / _MARKER).touch(mode=0o600)
            found = self._root.stat()
            if found.st_uid == os.geteuid():  # Prompts and answers of all tenants: not for other accounts.
                self._root.chmod(stat.S_IMODE(found.st_mode) & ~stat.S_IRWXO)
        except OSError as error:
            reason = f"{folder} must be a folder that this process may write: {error.strerror}"
            raise ConfigError(reason, where="jobs.files.path") from error

    async def put(self, file: str, part: str, data: bytes) -> None:
        """Write a part."""

        def write() -> None:
            (self._root / _MARKER).stat()
            folder = self._root / file
            folder.mkdir(exist_ok=True)
            draft = folder / f".{part}.{secrets.token_hex(4)}"
            try:
                with draft.open("wb") as handle:
                    handle.write(data)
                    handle.flush()
                    os.fsync(handle.fileno())
                draft.replace(folder / part)
            except OSError:
                draft.unlink(missing_ok=True)
                raise
            sync(folder)
            sync(self._root)

        await _in_thread(write)

    async def get(self, file: str, part: str) -> bytes:
        """Return a part. Raises FileContentLost."""

        def read() -> bytes | None:
            try:
                return (self._root / file / part).read_bytes()
            except FileNotFoundError:
                (self._root / _MARKER).stat()
                return None

        data = await _in_thread(read)
        if data is None:
            raise FileContentLost(f"jobs.files.path has no part {part} of {file} any more.")
        return data

    async def delete(self, file: str) -> None:
        """Delete all parts."""

        def remove() -> None:
            (self._root / _MARKER).stat()
            if (self._root / file).is_dir():
                shutil.rmtree(self._root / file)

        await _in_thread(remove)

    async def close(self) -> None:
        """Nothing is open."""


async def _in_thread(work: Callable[[], T]) -> T:
    """Raises FileStoreUnavailable."""
    try:
        return await to_thread.run_sync(work)
    except OSError as error:
        _log.warning("jobs.files.path: %s", error)
        reason = error.strerror or type(error).__name__
        raise FileStoreUnavailable(
            f"The folder of files fails ({reason}). Try again later.", retry_after_s=_RETRY_AFTER_S
        ) from error
