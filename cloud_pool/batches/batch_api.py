"""OpenAI's /v1/files and /v1/batches, by jobs. Source: https://platform.openai.com/docs/api-reference/batch"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from causeway_server.router.api.operations import DeletedFile, FileView, list_page
from causeway_server.router.errors import (
    ClientGone,
    InvalidRequest,
    JobStoreUnavailable,
    ModelNotAllowed,
    UnsupportedFeature,
)
from causeway_server.router.jobs.submission import ENDPOINTS, body_digest, key_digest
from causeway_server.router.numbers import read_page
from causeway_server.router.openai.request_body import load, validate
from causeway_server.router.parts.uploads import CONTENT_KEPT, PART_PURPOSES, parse_upload_terms
from causeway_server.router.serving.logs import REQUEST
from causeway_server.router.serving.request import AiohttpRequest, check_upload, read_upload, send_continue
from causeway_server.router.serving.responses import ServerResponse, json_response

from ..accounts.audit import AuditLog
from ..core.principal import Grants, Principal, Scope
from ..core.request_context import BodyMemory
from ..http.request_admission import read_body, read_headers
from ..jobs.http.job_api import NO_AUDIT, Route, acceptance, begin_response, enqueue_span, route, write_chunk
from ..storage.batch_store import COMPLETION_WINDOW, Batch, BatchState
from ..storage.config import JobsConfig
from ..storage.file_contents import FileContentLost
from ..storage.file_store import PART_BYTES, StoredFile
from ..storage.stores import JobStores
from ..tiers.tier import AllowedTiers
from .input_file import BatchLineError

if TYPE_CHECKING:
    from ..observability.tracing import JobTrace

_READ_S = 20.0
_MAX_BODY = 64 * 1024
_UPLOAD_BYTES = 2 * PART_BYTES  # that an upload has in memory at a time
_QUEUE = "batches"
UploadPurpose = Literal["batch", "user_data", "vision", "assistants"]
_ADVICE = {"window": "There are no off-peak hours: leave it out."}
PURPOSES: tuple[UploadPurpose, ...] = get_args(UploadPurpose)
FILE_SCOPES: tuple[Scope, ...] = ("jobs", "chat")  # a client that may only chat names files, too
_MetadataKey = Annotated[str, Meta(max_length=64)]
_MetadataValue = Annotated[str, Meta(max_length=512)]


class _RequestCounts(msgspec.Struct):
    total: int
    completed: int
    failed: int


class _InputErrors(msgspec.Struct):
    data: list[BatchLineError]
    object: str = "list"


class BatchView(msgspec.Struct, kw_only=True):
    """OpenAI's batch object."""

    id: str
    object: str = "batch"
    endpoint: str
    errors: _InputErrors | None
    input_file_id: str
    completion_window: str = COMPLETION_WINDOW
    status: BatchState
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: _RequestCounts
    metadata: msgspec.Raw


def file_view(file: StoredFile) -> FileView:
    return FileView(file.id, file.bytes, file.created // 1000, file.expires // 1000, file.filename, file.purpose)


def batch_view(batch: Batch) -> BatchView:
    errors = None
    if batch.line_errors:
        errors = _InputErrors(msgspec.json.decode(batch.line_errors, type=list[BatchLineError]))
    return BatchView(
        id=batch.id,
        endpoint=batch.endpoint,
        errors=errors,
        input_file_id=batch.input,
        status=batch.state,
        output_file_id=batch.output or None,
        error_file_id=batch.errors or None,
        created_at=batch.created // 1000,
        in_progress_at=_seconds(batch.in_progress_at),
        expires_at=batch.expires // 1000,
        finalizing_at=_seconds(batch.finalizing_at),
        completed_at=_seconds(batch.completed_at),
        failed_at=_seconds(batch.failed_at),
        expired_at=_seconds(batch.expired_at),
        cancelling_at=_seconds(batch.cancelling_at),
        cancelled_at=_seconds(batch.cancelled_at),
        request_counts=_RequestCounts(batch.total, batch.completed, batch.failed),
        metadata=msgspec.Raw(batch.metadata.encode()),
    )


def _seconds(ms: int | None) -> int | None:
    return None if ms is None else ms // 1000


class BatchRequest(msgspec.Struct, frozen=True):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Annotated[dict[_MetadataKey, _MetadataValue], Meta(max_length=16)] | None = None
    window: None = None  # of an earlier version; refused


class BatchList(msgspec.Struct):
    data: list[BatchView]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


@dataclass(eq=False, repr=False)
class BatchApi:
    """Handlers of files and batches; JobApi routes to them."""

    config: JobsConfig
    stores: JobStores
    trace: JobTrace | None = None
    _: KW_ONLY
    # memory limit of request bodies; the server releases their bytes
    bodies: BodyMemory = field(default_factory=BodyMemory)
    allowed: Callable[[Principal], AllowedTiers] = lambda _: None  # returns the tiers that a principal may use
    # returns the tags of a file or batch, with its tenant's regions; raises OutsideRegion
    bind: Callable[[Principal, tuple[str, ...]], tuple[str, ...]] = lambda _, tags: tags
    audit: AuditLog = NO_AUDIT  # audit log, which gets a record of each accepted file and batch

    def __post_init__(self) -> None:
        self.routes: tuple[Route, ...] = (
            route("/v1/files", FILE_SCOPES, POST=self._upload, GET=self._list_files),
            route(r"/v1/files/([\w.-]{1,80})", FILE_SCOPES, GET=self._get_file, DELETE=self._delete_file),
            route(r"/v1/files/([\w.-]{1,80})/content", FILE_SCOPES, GET=self._file_content),
            route("/v1/batches", POST=self._create, GET=self._list),
            route(r"/v1/batches/([\w.-]{1,80})", GET=self._get),
            route(r"/v1/batches/([\w.-]{1,80})/cancel", POST=self._cancel),
        )

    # --- files -----------------------------------------------------------------------------------------------------

    async def _upload(self, request: AiohttpRequest, principal: Principal, _: str) -> ServerResponse:
        await self.stores.durability.ensure()
        tags = self.bind(principal, read_headers(request.headers.items()).tags)
        expected_bytes = check_upload(request)
        self.bodies.hold(request, principal.caller, _UPLOAD_BYTES)
        async with self.stores.files.write(principal.owner, expected_bytes) as writer:
            send_continue(request)
            upload = await read_upload(request, writer.write, _READ_S)
            terms = parse_upload_terms(upload.fields, PURPOSES, self.config.batches.file_ttl_s)
            purpose = msgspec.convert(terms.purpose, UploadPurpose)
            if purpose == "batch":
                principal.require("jobs")
            elif upload.is_empty:
                raise InvalidRequest("`file` is empty. Send its bytes.", param="file")
            file = await writer.finish(upload.filename, purpose, terms.ttl_s, tags)
        return json_response(file_view(file))

    async def _list_files(self, request: AiohttpRequest, principal: Principal, _: str) -> ServerResponse:
        limit, after = read_page(request.query)
        purpose = request.query.get("purpose", "")[:80]
        files = await self.stores.files.list_owned(principal.owner, after=after, limit=limit + 1, purpose=purpose)
        return json_response(list_page([file_view(file) for file in files], limit))

    async def _get_file(self, _: AiohttpRequest, principal: Principal, name: str) -> ServerResponse:
        return json_response(file_view(await self.stores.files.get(name, principal.owner)))

    async def _delete_file(self, _: AiohttpRequest, principal: Principal, name: str) -> ServerResponse:
        file = await self.stores.files.get(name, principal.owner)
        await self.stores.files.delete(file)
        return json_response(DeletedFile(file.id))

    async def _file_content(self, request: AiohttpRequest, principal: Principal, name: str) -> ServerResponse:
        file = await self.stores.files.get(name, principal.owner)
        if file.purpose in PART_PURPOSES:
            raise UnsupportedFeature(CONTENT_KEPT)
        self.bind(principal, tuple(file.tags.split(",")))  # content leaves the store
        pieces = self.stores.files.read(file)
        first = await anext(pieces, b"")  # before the headers: an error is still a response of its own
        headers = {"content-type": "application/octet-stream", "x-request-id": REQUEST.get()}
        from aiohttp import web

        response = web.StreamResponse(headers=headers)
        response.content_length = file.bytes
        if not await begin_response(response, request):
            return response
        try:
            await write_chunk(response, first)
            async for piece in pieces:
                await write_chunk(response, piece)
        except (ClientGone, JobStoreUnavailable, FileContentLost):
            # The headers have promised a length: only a cut connection tells the client that the body is incomplete.
            if request.transport is not None:
                request.transport.close()
        return response

    # --- batches ---------------------------------------------------------------------------------------------------

    async def _create(self, request: AiohttpRequest, principal: Principal, _: str) -> ServerResponse:
        body = await read_body(request, _MAX_BODY, _READ_S, self.bodies, principal)
        batch_request, headers = validate(load(body), BatchRequest, _ADVICE), read_headers(request.headers.items())
        endpoint = next((known for known in ENDPOINTS if known == batch_request.endpoint), None)
        if endpoint is None:
            raise UnsupportedFeature(f"`endpoint` must be one of {', '.join(ENDPOINTS)}.", param="endpoint")
        if batch_request.completion_window != COMPLETION_WINDOW:
            raise UnsupportedFeature(f"`completion_window` must be {COMPLETION_WINDOW}.", param="completion_window")
        tags = self.bind(principal, headers.tags)
        await self.stores.durability.ensure()
        key = key_digest(request.headers.get("idempotency-key", ""))
        # The same key of the same owner gives the same id, so that a repeated request finds the first batch.
        name = hashlib.sha256(f"{principal.owner}\0{key}".encode()).hexdigest()[:24] if key else secrets.token_hex(12)
        with enqueue_span(self.trace, f"batch_{name}", _QUEUE, headers.traceparent, tags) as traceparent:
            batch = await self.stores.batches.create(
                f"batch_{name}",
                principal.owner,
                batch_request.input_file_id,
                endpoint,
                msgspec.json.encode(batch_request.metadata),
                body_digest(",".join(headers.tags), body),
                grants=self._grants(principal),
                token_id=principal.token_id,
                token_issued=principal.issued,
                tags=tags,
                traceparent=traceparent,
            )
        await self.audit.write(acceptance(principal, "batch", batch.id, "", batch.created))
        return json_response(batch_view(batch))

    def _grants(self, principal: Principal) -> Grants:
        """Return the grants for the lines, which are read later, when the token is not at hand."""
        allowed = self.allowed(principal)
        if allowed is not None and not allowed:
            raise ModelNotAllowed(
                "No model is allowed by both your tenant and your token, so no line of a batch could run."
            )
        models = None if allowed is None else tuple(sorted(allowed))
        return Grants(models=models, modalities=principal.grants.modalities)

    async def _get(self, _: AiohttpRequest, principal: Principal, name: str) -> ServerResponse:
        return json_response(batch_view(await self.stores.batches.get(name, principal.owner)))

    async def _list(self, request: AiohttpRequest, principal: Principal, _: str) -> ServerResponse:
        limit, after = read_page(request.query)
        batches = await self.stores.batches.list_owned(principal.owner, after=after, limit=limit + 1)
        rows = [batch_view(batch) for batch in batches[:limit]]
        first, last = (rows[0].id, rows[-1].id) if rows else (None, None)
        return json_response(BatchList(rows, len(batches) > limit, first, last))

    async def _cancel(self, _: AiohttpRequest, principal: Principal, name: str) -> ServerResponse:
        await self.stores.batches.cancel(await self.stores.batches.get(name, principal.owner))
        return json_response(batch_view(await self.stores.batches.get(name, principal.owner)))
