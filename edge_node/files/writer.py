"""The writing of one uploaded file, piece by piece."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.errors import InvalidRequest
from router.parts.upload_terms import UploadTerms
from router.types import RoutingHints

from .folder import StoredFile

if TYPE_CHECKING:
    from .store import FileStore

_WRITE_BYTES = 1024 * 1024


class FileWriter:
    """Writes one file. Holds up to 1 MiB of it in memory."""

    def __init__(self, store: FileStore, name: str, owner: str) -> None:
        self.id = name
        self.owner = owner
        self.reserved = 0
        self.written = 0
        self.finished = False
        self.draft = store.draft(name)
        self._store = store
        self._buffer = bytearray()

    async def write(self, data: bytes) -> None:
        """Append bytes. Raises as `FileStore.write` does."""
        self._buffer += data
        size = self.written + len(self._buffer)
        if size > self.reserved:
            await self._store.reserve(self, size)
        if len(self._buffer) >= _WRITE_BYTES:
            await self._flush()

    async def finish(self, filename: str, terms: UploadTerms, hints: RoutingHints) -> StoredFile:
        """Make the file visible and return it. Raises InvalidRequest if it is empty, and as `FileStore.write` does."""
        await self._flush()
        if not self.written:
            raise InvalidRequest("`file` is empty. Send its bytes.", param="file")
        file = await self._store.publish(self, filename, terms, hints)
        self.finished = True
        return file

    async def _flush(self) -> None:
        if not self._buffer:
            return
        data = bytes(self._buffer)
        self._buffer.clear()
        self.written += len(data)
        await self._store.append(self.draft, data)
