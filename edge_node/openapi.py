"""The OpenAPI document of the daemon, which is made when the first client asks for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from msgspec import Meta

from causeway_server.router import errors
from causeway_server.router.api.document import ApiResponse, Operation, Parameter, openapi_document
from causeway_server.router.api.operations import SHARED_TYPES, by_name, file_upload
from causeway_server.router.api.reader import Api, read_api
from causeway_server.router.jobs.submission import JobFields
from causeway_server.router.jobs.webhooks import WebhookRefused
from causeway_server.router.openai.audio import WireSpeech
from causeway_server.router.parts.uploads import PartPurpose
from causeway_server.router.serving.console import media_type, page_files
from causeway_server.router.types import DecisionRecord, Prefer, Route

from . import daemon_version
from .backends.backend import CloudJobEnded
from .console.routes import PAGE, PolicyDraft, WhatIfQuestion
from .erasure import SignedErasure
from .files.store import FileFolderUnavailable, StorageFull
from .http.inspection import Readiness
from .jobs.api import EdgeJobList
from .jobs.record import EdgeJobView, JobDropped, JobLost, JobNotDead, JobNotEnded, OutboxFull
from .serving.requests import Status
from .serving.service import Explanation
from .storage.decisions import MAX_QUERY_LIMIT

_TYPES = {
    **SHARED_TYPES,
    **by_name(CloudJobEnded, DecisionRecord, EdgeJobList, Explanation, FileFolderUnavailable, JobDropped, JobFields),
    **by_name(JobLost, JobNotDead, JobNotEnded, OutboxFull, Readiness, SignedErasure, StorageFull, WebhookRefused),
    **by_name(PolicyDraft, WhatIfQuestion, WireSpeech, file_upload(PartPurpose)),
    "Job": EdgeJobView,
    "Prefer": Prefer,
    "Route": Route,
    "Status": Status,
    "Time": Annotated[float, Meta(ge=0)],
    "QueryLimit": Annotated[int, Meta(ge=1, le=MAX_QUERY_LIMIT)],
}
_CALLERS = dict.fromkeys(("chat", "jobs", "files"), "client")  # needs an API key if `server.keys` lists any
_TEXT = read_api(__package__, "openapi.yaml")
RESPONSE_HEADERS: Mapping[str, str] = _TEXT.headers["answered"] | _TEXT.headers["refused"]
"""The meaning of each header of a response."""
REQUEST_HEADERS: Mapping[str, str] = _TEXT.meanings("request_headers")
"""The meaning of each header of a request."""


def edge_document() -> dict[str, Any]:
    """Return the document. It is the same for each daemon of this version."""
    api = _api()
    return openapi_document(
        "Causeway edge",
        daemon_version(),
        edge_operations(),
        {"description": "An API key of `server.keys`; not needed if no keys are configured."},
        token_optional=True,
        webhooks=api.webhooks,
        schemas=api.schemas,
    )


def edge_operations() -> list[Operation]:
    """Return every operation that the daemon serves."""
    return [*_api().operations, *_console()]


def _api() -> Api:
    return Api(read_api("causeway_server.router.api", "operations.yaml").joined(_TEXT), _TYPES, _CALLERS)


def _console() -> Iterator[Operation]:
    for path, file in page_files(PAGE).items():
        yield Operation(
            "GET",
            path,
            "A file of the console, the same for everyone.",
            parameters=(Parameter("If-None-Match", "The ETag of the file that the browser has.", "header"),),
            responses=(
                ApiResponse(200, {media_type(file): None}),
                ApiResponse(304, meaning="The file has not changed."),
            ),
            errors=(errors.InvalidRequest, errors.MisdirectedRequest, errors.OriginNotAllowed, errors.CausewayError),
        )
