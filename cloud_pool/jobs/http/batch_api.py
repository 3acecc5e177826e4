"""OpenAI's /v1/files and /v1/batches, over jobs. Source: https://platform.openai.com/docs/api-reference/batch"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import AsyncIterator
from typing import Annotated

import anyio
import msgspec
from aiohttp import web
from msgspec import Meta

from router.errors import InvalidRequest, UnsupportedFeature

from ...accounts.identity.principal import Principal
from ...http.request_reader import read_body, read_headers
from ...http.responses import STALLED_S
from ...observability.tracing import JobTrace
from ..batches.batch_store import COMPLETION_WINDOW, BatchStore, BatchView, batch_view
from ..batches.file_store import FileStore, FileView, StoredFile, file_view
from ..batches.output_file import BatchResults
from ..config import JobsConfig
from ..errors import JobStoreUnavailable
from ..record import Endpoint
from ..store.durability import DurabilityCheck
from ..submission import key_digest
from .job_api import Route, page, reply, route
from .multipart import read_upload
from .tracing import enqueue_span

_READ_S = 20.0
_MAX_BODY = 64 * 1024
_QUEUE = "batches"
_ENDPOINTS: tuple[Endpoint, ...] = ("/v1/chat/completions", "/v1/completions")
_MetadataKey = Annotated[str, Meta(max_length=64)]
_MetadataValue = Annotated[str, Meta(max_length=512)]


class _BatchRequest(msgspec.Struct, frozen=True):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Annotated[dict[_MetadataKey, _MetadataValue], Meta(max_length=16)] | None = None


class _DeletedFile(msgspec.Struct):
    id: str
    object: str = "file"
    deleted: bool = True


class _FileList(msgspec.Struct):
    data: list[FileView]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class _BatchList(msgspec.Struct):
    data: list[BatchView]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class BatchApi:
    def __init__(
        self,
        config: JobsConfig,
        files: FileStore,
        batches: BatchStore,
        durability: DurabilityCheck,
        trace: JobTrace | None = None,
    ) -> None:
        self._config = config
        self._durability = durability
        self._trace = trace
        self._files = files
        self._batches = batches
        self._results = BatchResults(batches)
        self.routes: list[Route] = [
            route("/v1/files", POST=self._upload, GET=self._list_files),
            route(r"/v1/files/([\w.-]{1,80})", GET=self._file, DELETE=self._delete),
            route(r"/v1/files/([\w.-]{1,80})/content", GET=self._content),
            route("/v1/batches", POST=self._create, GET=self._list),
            route(r"/v1/batches/([\w.-]{1,80})", GET=self._get),
            route(r"/v1/batches/([\w.-]{1,80})/cancel", POST=self._cancel),
        ]

    # --- files -----------------------------------------------------------------------------------------------------

    async def _upload(self, http: web.BaseRequest, principal: Principal, _: str) -> web.StreamResponse:
        await self._durability.ensure()
        upload = await read_upload(http, self._config.batches.max_file_bytes)
        if upload.purpose != "batch":
            raise UnsupportedFeature("`purpose` must be batch: no other kind of file is kept here.", param="purpose")
        return reply(file_view(await self._files.upload(principal.owner, upload.filename, upload.pieces)))

    async def _list_files(self, http: web.BaseRequest, principal: Principal, _: str) -> web.StreamResponse:
        limit, after = page(http)
        views = [file_view(file) for file in await self._files.owned(principal.owner)]
        if purpose := http.query.get("purpose"):
            views = [view for view in views if view.purpose == purpose]
        ids = [view.id for view in views]
        views = views[ids.index(after) + 1 if after in ids else 0 :]
        rows = views[:limit]
        return reply(_FileList(rows, len(views) > limit, rows[0].id if rows else None, rows[-1].id if rows else None))

    async def _file(self, http: web.BaseRequest, principal: Principal, name: str) -> web.StreamResponse:
        return reply(file_view(await self._files.get(name, principal.owner)))

    async def _delete(self, http: web.BaseRequest, principal: Principal, name: str) -> web.StreamResponse:
        file = await self._files.get(name, principal.owner)
        await self._files.delete(file)
        return reply(_DeletedFile(file.id))

    async def _content(self, http: web.BaseRequest, principal: Principal, name: str) -> web.StreamResponse:
        file = await self._files.get(name, principal.owner)
        pieces = await self._pieces(file)
        response = web.StreamResponse(headers={"content-type": "application/octet-stream"})
        response.content_length = file.bytes
        await response.prepare(http)
        try:
            async for piece in pieces:
                with anyio.fail_after(STALLED_S):
                    await response.write(piece)
        except (ConnectionError, TimeoutError, JobStoreUnavailable):
            # The head has promised a length: a cut connection is the only honest end.
            if http.transport is not None:
                http.transport.close()
        return response

    async def _pieces(self, file: StoredFile) -> AsyncIterator[bytes]:
        if file.part:
            return self._results.lines(await self._batches.get(file.batch, file.owner), file.part)
        return self._files.content(file)

    # --- batches ---------------------------------------------------------------------------------------------------

    async def _create(self, http: web.BaseRequest, principal: Principal, _: str) -> web.StreamResponse:
        body = await read_body(http, _MAX_BODY, _READ_S)
        ask, inbound = _parsed(body), read_headers(http.headers)
        endpoint = next((known for known in _ENDPOINTS if known == ask.endpoint), None)
        if endpoint is None:
            raise UnsupportedFeature(f"`endpoint` is one of {', '.join(_ENDPOINTS)}", param="endpoint")
        if ask.completion_window != COMPLETION_WINDOW:
            raise UnsupportedFeature(f"`completion_window` must be {COMPLETION_WINDOW}", param="completion_window")
        await self._durability.ensure()
        key = key_digest(http.headers.get("idempotency-key", ""))
        # The same key of the same owner gives the same id, and the second to come finds the first.
        name = hashlib.sha256(f"{principal.owner}\0{key}".encode()).hexdigest()[:24] if key else secrets.token_hex(12)
        with enqueue_span(self._trace, f"batch_{name}", _QUEUE, inbound.traceparent) as traceparent:
            batch = await self._batches.create(
                f"batch_{name}",
                principal.owner,
                ask.input_file_id,
                endpoint,
                msgspec.json.encode(ask.metadata),
                hashlib.sha256(b",".join((*(tag.encode() for tag in inbound.tags), body))).hexdigest(),
                tags=inbound.tags,
                traceparent=traceparent,
            )
        return reply(batch_view(batch))

    async def _get(self, http: web.BaseRequest, principal: Principal, name: str) -> web.StreamResponse:
        return reply(batch_view(await self._batches.get(name, principal.owner)))

    async def _list(self, http: web.BaseRequest, principal: Principal, _: str) -> web.StreamResponse:
        limit, after = page(http)
        found = await self._batches.owned(principal.owner, after=after, limit=limit + 1)
        rows = [batch_view(batch) for batch in found[:limit]]
        first, last = (rows[0].id, rows[-1].id) if rows else (None, None)
        return reply(_BatchList(rows, len(found) > limit, first, last))

    async def _cancel(self, http: web.BaseRequest, principal: Principal, name: str) -> web.StreamResponse:
        await self._batches.cancel(await self._batches.get(name, principal.owner))
        return reply(batch_view(await self._batches.get(name, principal.owner)))


def _parsed(body: bytes) -> _BatchRequest:
    """Raises InvalidRequest."""
    try:
        return msgspec.json.decode(body, type=_BatchRequest)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$.")
        raise InvalidRequest(reason, param=place.rstrip("`") or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidRequest("The body is not a JSON object.") from None
