"""Uploaded files that requests name: their bytes take the place of their ids before anything else reads a body."""

from __future__ import annotations

from collections.abc import Callable

from router.errors import InvalidRequest, NotFound, UnsupportedFeature
from router.parts.upload_terms import PART_PURPOSES
from router.parts.uploads import Reference, Upload, is_file_id, named_files
from router.types import RoutingHints

from ..storage.errors import FileContentLost
from ..storage.files.file_store import FileStore, StoredFile


class NamedFileReader:
    """Reads the files that bodies name."""

    def __init__(self, files: FileStore) -> None:
        self._files = files

    async def inline(
        self, body: bytes, owner: str, max_bytes: int, hold: Callable[[int], None] = lambda _: None
    ) -> bytes:
        """Return a body with its files in it; one that names none as it is. Afterwards no file is needed any more.

        Args:
            owner: of the files.
            max_bytes: of the body with its files in base64.
            hold: counts so many bytes of memory for the body.

        Raises:
            NotFound: `owner` has no such file; names the part.
            BodyTooLarge: the files are too large for one request.
            InvalidRequest: the body is malformed, a file is the input of a batch, or is no picture.
            JobStoreUnavailable: the files cannot be read.
            CausewayError: what `hold` raises.
        """
        named = named_files(body)
        if named is None:
            return body
        files = {name: await self._find(reference, owner) for name, reference in named.first.items()}
        uploads = {name: Upload(name, file.filename, file.bytes) for name, file in files.items()}
        hold(named.check_size(uploads, len(body), max_bytes))
        contents = {name: await self._read(file, named.first[name]) for name, file in files.items()}
        named.restrict(RoutingHints(tags=tuple(tag for file in files.values() for tag in file.tags.split(",") if tag)))
        return named.inline(uploads, contents)

    async def _find(self, reference: Reference, owner: str) -> StoredFile:
        try:
            if not is_file_id(reference.id):
                raise NotFound(f"There is no file {reference.id[:80]!r} of yours.")
            file = await self._files.get(reference.id, owner)
        except NotFound as error:
            message = f"`{reference.path}`: {error.message} It expired, was deleted, or never was here."
            raise NotFound(message, param=reference.path) from None
        if file.purpose not in PART_PURPOSES:
            raise InvalidRequest(
                f"`{reference.path}`: {file.id} has the purpose {file.purpose}. Upload it with user_data to name it.",
                param=reference.path,
            )
        return file

    async def _read(self, file: StoredFile, reference: Reference) -> bytes:
        try:
            return b"".join([piece async for piece in self._files.read(file)])
        except FileContentLost:
            found = await self._files.lookup(file.id)
            if found is not None and found.state == "ready":
                raise
            message = f"`{reference.path}`: {file.id} was deleted in the meantime."
            raise NotFound(message, param=reference.path) from None


def refuse_named_files(body: bytes) -> None:
    """Raises UnsupportedFeature for a body that names files, where none are read."""
    named = named_files(body)
    if named is not None:
        reference = named.references[0]
        raise UnsupportedFeature(
            f"`{reference.path}`: requests name uploaded files over HTTP, in gRPC calls and in batches. Send the bytes "
            "in base64.",
            param=reference.path,
        )
