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

from ..identity.principal import Principal
from ..inbound import read_body, read_headers
from ..replies import STALLED_S
from ..traced import JobTrace
from .api import Route, page, reply, route
from .batches import WINDOW, Batches, BatchView, batch_view
from .config import JobsConfig
from .durability import Durability
from .errors import StoreUnavailable
from .files import File, Files, FileView, file_view
from .intake import key_digest
from .record import Endpoint
from .results import Results
from .sending import sending
from .uploads import read_upload

_READ_S = 20.0
_MAX_BODY = 64 * 1024
_QUEUE = "batches"
_ENDPOINTS: tuple[Endpoint, ...] = ("/v1/chat/completions", "/v1/completions")
_Key = Annotated[str, Meta(max_length=64)]
_Value = Annotated[str, Meta(max_length=512)]


class _Ask(msgspec.Struct, frozen=True):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Annotated[dict[_Key, _Value], Meta(max_length=16)] | None = None


class _Deleted(msgspec.Struct):
    id: str
    object: str = "file"
    deleted: bool = True


class _Files(msgspec.Struct):
    data: list[FileView]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class _Batches(msgspec.Struct):
    data: list[BatchView]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class BatchApi:
    def __init__(
        self,
        config: JobsConfig,
        files: Files,
        batches: Batches,
        durability: Durability,
        trace: JobTrace | None = None,
    ) -> None:
        self._config = config
        self._durability = durability
        self._trace = trace
        self._files = files
        self._batches = batches
        self._results = Results(batches)
        self.routes: list[Route] = [
            route("/v1/files", POST=self._upload, GET=self._list_files),
            route(r"/v1/files/([\w.-]{1,80})", GET=self._file, DELETE=self._delete),
            route(r"/v1/files/([\w.-]{1,80})/content", GET=self._content),
            route("/v1/batches", POST=self._create, GET=self._list),
            route(r"/v1/batches/([\w.-]{1,80})", GET=self._get),
            route(r"/v1/batches/([\w.-]{1,80})/cancel", POST=self._cancel),
        ]

    # --- files -----------------------------------------------------------------------------------------------------

    async def _upload(self, http: web.BaseRequest, asker: Principal, _: str) -> web.StreamResponse:
        await self._durability.ensure()
        upload = await read_upload(http, self._config.batches.max_file_bytes)
        if upload.purpose != "batch":
            raise UnsupportedFeature("`purpose` must be batch: no other kind of file is kept here.", param="purpose")
        return reply(file_view(await self._files.upload(asker.owner, upload.filename, upload.pieces)))

    async def _list_files(self, http: web.BaseRequest, asker: Principal, _: str) -> web.StreamResponse:
        limit, after = page(http)
        views = [file_view(file) for file in await self._files.owned(asker.owner)]
        if purpose := http.query.get("purpose"):
            views = [view for view in views if view.purpose == purpose]
        ids = [view.id for view in views]
        views = views[ids.index(after) + 1 if after in ids else 0 :]
        rows = views[:limit]
        return reply(_Files(rows, len(views) > limit, rows[0].id if rows else None, rows[-1].id if rows else None))

    async def _file(self, http: web.BaseRequest, asker: Principal, name: str) -> web.StreamResponse:
        return reply(file_view(await self._files.get(name, asker.owner)))

    async def _delete(self, http: web.BaseRequest, asker: Principal, name: str) -> web.StreamResponse:
        file = await self._files.get(name, asker.owner)
        await self._files.delete(file)
        return reply(_Deleted(file.id))

    async def _content(self, http: web.BaseRequest, asker: Principal, name: str) -> web.StreamResponse:
        file = await self._files.get(name, asker.owner)
        pieces = await self._pieces(file)
        response = web.StreamResponse(headers={"content-type": "application/octet-stream"})
        response.content_length = file.bytes
        await response.prepare(http)
        try:
            async for piece in pieces:
                with anyio.fail_after(STALLED_S):
                    await response.write(piece)
        except (ConnectionError, TimeoutError, StoreUnavailable):
            # The head has promised a length: a cut connection is the only honest end.
            if http.transport is not None:
                http.transport.close()
        return response

    async def _pieces(self, file: File) -> AsyncIterator[bytes]:
        if file.part:
            return self._results.lines(await self._batches.get(file.batch, file.owner), file.part)
        return self._files.content(file)

    # --- batches ---------------------------------------------------------------------------------------------------

    async def _create(self, http: web.BaseRequest, asker: Principal, _: str) -> web.StreamResponse:
        body = await read_body(http, _MAX_BODY, _READ_S)
        ask, inbound = _parsed(body), read_headers(http.headers)
        endpoint = next((known for known in _ENDPOINTS if known == ask.endpoint), None)
        if endpoint is None:
            raise UnsupportedFeature(f"`endpoint` is one of {', '.join(_ENDPOINTS)}", param="endpoint")
        if ask.completion_window != WINDOW:
            raise UnsupportedFeature(f"`completion_window` must be {WINDOW}", param="completion_window")
        await self._durability.ensure()
        key = key_digest(http.headers.get("idempotency-key", ""))
        # The same key of the same owner gives the same id, and the second to come finds the first.
        name = hashlib.sha256(f"{asker.owner}\0{key}".encode()).hexdigest()[:24] if key else secrets.token_hex(12)
        with sending(self._trace, f"batch_{name}", _QUEUE, inbound.traceparent) as traceparent:
            batch = await self._batches.create(
                f"batch_{name}",
                asker.owner,
                ask.input_file_id,
                endpoint,
                msgspec.json.encode(ask.metadata),
                hashlib.sha256(b",".join((*(tag.encode() for tag in inbound.tags), body))).hexdigest(),
                tags=inbound.tags,
                traceparent=traceparent,
            )
        return reply(batch_view(batch))

    async def _get(self, http: web.BaseRequest, asker: Principal, name: str) -> web.StreamResponse:
        return reply(batch_view(await self._batches.get(name, asker.owner)))

    async def _list(self, http: web.BaseRequest, asker: Principal, _: str) -> web.StreamResponse:
        limit, after = page(http)
        found = await self._batches.owned(asker.owner, after=after, limit=limit + 1)
        rows = [batch_view(batch) for batch in found[:limit]]
        first, last = (rows[0].id, rows[-1].id) if rows else (None, None)
        return reply(_Batches(rows, len(found) > limit, first, last))

    async def _cancel(self, http: web.BaseRequest, asker: Principal, name: str) -> web.StreamResponse:
        await self._batches.cancel(await self._batches.get(name, asker.owner))
        return reply(batch_view(await self._batches.get(name, asker.owner)))


def _parsed(body: bytes) -> _Ask:
    """Raises InvalidRequest."""
    try:
        return msgspec.json.decode(body, type=_Ask)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$.")
        raise InvalidRequest(reason, param=place.rstrip("`") or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidRequest("The body is not a JSON object.") from None
