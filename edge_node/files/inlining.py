"""The bytes of uploaded files in the place of their ids, before anything else reads a body."""

from __future__ import annotations

from router.errors import NotFound
from router.parts.uploads import Upload, named_files
from router.types import RoutingHints

from ..http.request_reader import Room
from .folder import DeviceFile
from .store import DeviceFileStore


class FileInliner:
    """Reads the files that bodies name.

    Args:
        max_body_bytes: of a body with its files in base64.
    """

    def __init__(self, store: DeviceFileStore, max_body_bytes: int) -> None:
        self._store = store
        self._max_body_bytes = max_body_bytes

    async def inline(self, body: bytes, owner: str, room: Room) -> bytes:
        """Return a body with its files in it; one that names none as it is. Afterwards no file is needed any more.

        A box without files leaves ids to the target: it may know them.

        Raises:
            NotFound: `owner` has no such file; names the part.
            BodyTooLarge: the files are too large for one request.
            QueueFull: too much is in memory.
            InvalidRequest: the body is malformed, a file is no picture, or the preference contradicts that of a file.
            FileStoreUnavailable: a file cannot be read.
        """
        named = named_files(body) if self._store.in_use else None
        if named is None:
            return body
        files: dict[str, DeviceFile] = {}
        for name, reference in named.first.items():
            try:
                files[name] = self._store.get(name, owner)
            except NotFound as error:
                raise NotFound(f"`{reference.path}`: {error.message}", param=reference.path) from None
        uploads = {name: Upload(name, file.filename, file.bytes) for name, file in files.items()}
        size = named.check_size(uploads, len(body), self._max_body_bytes)
        with room() as take:
            take(size)
            contents: dict[str, bytes] = {}
            for name, file in files.items():
                try:
                    contents[name] = await self._store.read(file)
                except NotFound as error:
                    path = named.first[name].path
                    raise NotFound(f"`{path}`: {error.message}", param=path) from None
            for file in files.values():
                named.restrict(RoutingHints(prefer=file.prefer, tags=file.tags))
            return named.inline(uploads, contents)
