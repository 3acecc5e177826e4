"""Read the lines of an input file from an offset on, part by part."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from ..storage.files.file_store import FilePart, FileStore, StoredFile
from .input_file import LineSplitter, RawLine

_KEPT_PARTS = 8


class InputReader:
    """Reads lines. Keeps the last part of a few files: the next lines are mostly in it."""

    def __init__(self, files: FileStore, max_line_bytes: int) -> None:
        self._files = files
        self._max_line_bytes = max_line_bytes
        self._last_parts: dict[str, tuple[str, bytes]] = {}  # by file

    async def pages(self, file: StoredFile, offset: int = 0) -> AsyncGenerator[list[RawLine], None]:
        """Yield the lines from `offset` on, those of one part at a time.

        Raises JobStoreUnavailable or FileContentLost.
        """
        splitter = LineSplitter(offset, self._max_line_bytes)
        begin = 0
        for part in await self._files.parts(file.id):
            if begin + part.bytes > offset:
                data = await self._read(file, part)
                yield splitter.feed(data[max(0, offset - begin) :])
            begin += part.bytes
        yield splitter.finish()

    async def lines(self, file: StoredFile, offset: int) -> AsyncGenerator[RawLine, None]:
        """Yield the lines from `offset` on. Raises JobStoreUnavailable or FileContentLost."""
        async with aclosing(self.pages(file, offset)) as pages:
            async for page in pages:
                for line in page:
                    yield line

    async def _read(self, file: StoredFile, part: FilePart) -> bytes:
        name, data = self._last_parts.pop(file.id, ("", b""))
        if name != part.name:
            data = await self._files.read_part(file, part)
        self._last_parts[file.id] = (part.name, data)
        while len(self._last_parts) > _KEPT_PARTS:
            del self._last_parts[next(iter(self._last_parts))]
        return data
