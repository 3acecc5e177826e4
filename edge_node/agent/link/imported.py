"""The agent's source of updates: the control plane, and files imported from a medium (see `medium`)."""

from __future__ import annotations

import shutil
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from ..source import FolderSource, Source

IMPORT, WANTED = "import", "wanted"
_AWAY_S = 60.0


class SourceWithImport:
    """The control plane's files, and while it is away the imported ones. Imported blobs come first: they are here.

    Args:
        folder: STATE_DIR/fleet.
        monotonic: Seconds that only grow.
    """

    def __init__(self, plane: Source, folder: Path, monotonic: Callable[[], float]) -> None:
        self._plane = plane
        self._folder = folder / IMPORT
        self._monotonic = monotonic
        self._away_until = float("-inf")

    async def fetch(self, path: str, offset: int = 0) -> AsyncGenerator[bytes]:
        """Yield a file from `offset` on. Raises FileNotFoundError, OSError."""
        here = self._here(path)
        if here and (path.startswith("blobs/") or self._monotonic() < self._away_until):
            async for chunk in FolderSource(self._folder).fetch(path, offset):
                yield chunk
            return
        if self._monotonic() < self._away_until and self.exists:
            raise FileNotFoundError(f"what was imported has no {path}")
        begun = False
        try:
            async for chunk in self._plane.fetch(path, offset):
                begun = True
                yield chunk
            return
        except FileNotFoundError:
            raise
        except OSError:
            if begun or not self.exists:
                raise
            self._away_until = self._monotonic() + _AWAY_S  # do not wait for each file's time-out
        if not here:
            raise FileNotFoundError(f"what was imported has no {path}")
        async for chunk in FolderSource(self._folder).fetch(path, offset):
            yield chunk

    @property
    def exists(self) -> bool:
        """Whether there are imported files."""
        return (self._folder / WANTED).exists()

    @property
    def stamp(self) -> int:
        """A number that differs after each import; 0: nothing was imported."""
        try:
            return (self._folder / WANTED).stat().st_mtime_ns
        except OSError:
            return 0

    @property
    def wanted(self) -> str | None:
        """The bundle that the imported plan assigns."""
        try:
            return (self._folder / WANTED).read_text() or None
        except OSError:
            return None

    def remove(self) -> None:
        """Delete the imported files: the box has installed what it needs."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _here(self, path: str) -> bool:
        return ".." not in path and (self._folder / path).is_file()
