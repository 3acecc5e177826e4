"""`/v1/files` in OpenAI's form, and the bytes of uploaded files in the place of their ids in the bodies of requests.

Every handler acts for the authenticated client alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from router.api.operations import DeletedFile, list_page
from router.errors import InvalidRequest, NotFound, UnsupportedFeature
from router.numbers import read_page
from router.parts.uploads import CONTENT_KEPT, PART_PURPOSES, Upload, named_files, parse_upload_terms
from router.serving.request import TAGS, Handler, check_upload, read_upload, send_continue
from router.serving.responses import json_response
from router.types import RoutingHints

from ..http.api import RequestReader, Room, routing_hints
from .folder import DeviceFile
from .store import DeviceFileStore

PATH = "/v1/files"
_MAX_TAG_BYTES = 1024  # they are in the file's header


class FileApi:
    """The handlers."""

    def __init__(self, store: DeviceFileStore, reader: RequestReader, piece_s: float) -> None:
        self._store = store
        self._reader = reader
        self._piece_s = piece_s

    def paths(self) -> Mapping[str, tuple[str, Handler]]:
        """Methods and handler of each path."""
        return {
            PATH: ("GET, POST", self._collection),
            f"{PATH}/{{id}}": ("GET, DELETE", self._file),
            f"{PATH}/{{id}}/content": ("GET", self._content),
        }

    async def _collection(self, http: web.BaseRequest) -> web.StreamResponse:
        return await self._upload(http) if http.method == "POST" else self._list(http)

    async def _upload(self, http: web.BaseRequest) -> web.StreamResponse:
        hints = routing_hints(http.headers, self._reader.caller(http))
        if sum(len(tag.encode("utf-8", "replace")) for tag in hints.tags) > _MAX_TAG_BYTES:
            message = f"The tags of a file may have {_MAX_TAG_BYTES} bytes together. Send fewer or shorter ones."
            raise InvalidRequest(message, param=TAGS)
        expected_bytes = check_upload(http)
        async with self._store.write(hints.client, expected_bytes) as writer:
            send_continue(http)
            form = await read_upload(http, writer.write, self._piece_s)
            terms = parse_upload_terms(form.fields, PART_PURPOSES, self._store.max_ttl_s)
            file = await writer.finish(form.filename, terms, hints)
        return json_response(self._store.view(file))

    def _list(self, http: web.BaseRequest) -> web.Response:
        owner = self._reader.caller(http).name
        limit, after = read_page(http.query)
        views = [self._store.view(file) for file in self._store.list_owned(owner)]
        return json_response(list_page(views, limit, after, http.query.get("purpose", "")))

    async def _file(self, http: web.BaseRequest) -> web.StreamResponse:
        owner, name = self._reader.caller(http).name, http.path.removeprefix(f"{PATH}/")
        if http.method != "DELETE":
            return json_response(self._store.view(self._store.get(name, owner)))
        await self._store.delete(name, owner)
        return json_response(DeletedFile(name))

    async def _content(self, http: web.BaseRequest) -> web.StreamResponse:
        owner, name = self._reader.caller(http).name, http.path.removeprefix(f"{PATH}/").removesuffix("/content")
        self._store.get(name, owner)
        raise UnsupportedFeature(CONTENT_KEPT)


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
