"""`/v1/files` in OpenAI's form. Every handler acts for the authenticated client alone."""

from __future__ import annotations

from collections.abc import Mapping

from causeway_server.router.api.operations import DeletedFile, list_page
from causeway_server.router.errors import InvalidRequest, UnsupportedFeature
from causeway_server.router.numbers import read_page
from causeway_server.router.parts.uploads import CONTENT_KEPT, PART_PURPOSES, parse_upload_terms
from causeway_server.router.serving.request import TAGS, AiohttpRequest, check_upload, read_upload, send_continue
from causeway_server.router.serving.responses import Handler, ServerResponse, json_response

from ..http.api import RequestReader, routing_hints
from .store import DeviceFileStore

PATH = "/v1/files"
_MAX_TAG_BYTES = 1024  # they are in the file's header


class FileApi:
    """The request handlers of uploaded files."""

    def __init__(self, store: DeviceFileStore, reader: RequestReader, piece_s: float) -> None:
        self._store = store
        self._reader = reader
        self._piece_s = piece_s

    def paths(self) -> Mapping[str, tuple[str, Handler]]:
        return {
            PATH: ("GET, POST", self._collection),
            f"{PATH}/{{id}}": ("GET, DELETE", self._file),
            f"{PATH}/{{id}}/content": ("GET", self._content),
        }

    async def _collection(self, http: AiohttpRequest) -> ServerResponse:
        return await self._upload(http) if http.method == "POST" else self._list(http)

    async def _upload(self, http: AiohttpRequest) -> ServerResponse:
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

    def _list(self, http: AiohttpRequest) -> ServerResponse:
        owner = self._reader.caller(http).name
        limit, after = read_page(http.query)
        views = [self._store.view(file) for file in self._store.list_owned(owner)]
        return json_response(list_page(views, limit, after, http.query.get("purpose", "")))

    async def _file(self, http: AiohttpRequest) -> ServerResponse:
        owner, name = self._reader.caller(http).name, http.path.removeprefix(f"{PATH}/")
        if http.method != "DELETE":
            return json_response(self._store.view(self._store.get(name, owner)))
        await self._store.delete(name, owner)
        return json_response(DeletedFile(name))

    async def _content(self, http: AiohttpRequest) -> ServerResponse:
        owner, name = self._reader.caller(http).name, http.path.removeprefix(f"{PATH}/").removesuffix("/content")
        self._store.get(name, owner)
        raise UnsupportedFeature(CONTENT_KEPT)
