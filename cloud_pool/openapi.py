"""The gateway's OpenAPI document, built when a client first asks for it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from importlib.metadata import version
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from causeway_server.router import errors
from causeway_server.router.api.document import (
    EVENTS,
    JSON,
    OPENAPI_PATH,
    AnyOf,
    ApiResponse,
    Operation,
    Parameter,
    openapi_document,
)
from causeway_server.router.api.operations import (
    ANY_REQUEST,
    BODY,
    Errors,
    file_operations,
    generation_operations,
    job_ended_operation,
    model_operations,
    openapi_operation,
    realtime_operation,
    secret_operations,
    stored_response_operations,
    transcription_operation,
)
from causeway_server.router.jobs.job import JobView
from causeway_server.router.jobs.webhooks import WebhookRefused
from causeway_server.router.numbers import MAX_PAGE
from causeway_server.router.openai.wire import WireChat, WireCompletion
from causeway_server.router.variants.feedback import Feedback, FeedbackReceipt

from .accounts.identity.api_keys import NewApiKey, Rotation
from .admission import Priority
from .batches.batch_api import BatchList, BatchRequest, BatchView, UploadPurpose
from .erasure import ErasureConflict, SignedReceipt
from .http.key_routes import KEYS, ApiKeyDeleted, ApiKeyList, ApiKeyView
from .http.server import ERASURE
from .jobs.http.job_api import JobList, WebhookDisabled
from .jobs.submission import CloudJobFields
from .jobs.worker.runner import TokenRevoked
from .storage.durability import JobStoreIsCluster, JobStoreNotDurable
from .storage.encryption import ContentKeyMissing
from .storage.file_contents import FileContentLost, FileStoreUnavailable, FileTooLarge
from .storage.file_store import QuotaExceeded
from .storage.redis_client import JobStoreLayoutMismatch, JobStoreNotReplicated

_IDENTITY: Errors = (errors.AuthenticationFailed, errors.IdentityUnavailable)
_MODELS: Errors = (errors.ModelNotFound, errors.ModelNotAllowed, errors.PermissionDenied)
_STORE: Errors = (
    *(errors.JobStoreUnavailable, JobStoreNotDurable, JobStoreLayoutMismatch),
    *(JobStoreNotReplicated, JobStoreIsCluster, ContentKeyMissing),
    errors.RecordUnreadable,
)
_JOBS: Errors = (*ANY_REQUEST, *_IDENTITY, errors.PermissionDenied, *_STORE)
_ACCEPTANCE: Errors = (
    *(*_STORE, errors.IdempotencyConflict, errors.RateLimited, errors.Shed, QuotaExceeded),
    *(WebhookRefused, WebhookDisabled),
)
_JOB_ENDS: Errors = (TokenRevoked, errors.ResultTooLarge, errors.JobCancelled)
_FILES: Errors = (FileStoreUnavailable,)
_NAMED_FILES: Errors = (*_FILES, errors.NotFound, FileContentLost)  # of requests that name uploaded files
_KEY = Parameter(
    "Idempotency-Key",
    "Key for repeating a request: the same request with the same key is the same job or batch.",
    "header",
)
_TRACE = Parameter("traceparent", "W3C trace context of the client.", "header")
_TAGS = Parameter(
    "x-causeway-tags", "At most 32 tags of at most 64 characters, separated by commas, case-insensitive.", "header"
)
_DEADLINE = Parameter(
    "x-causeway-deadline-ms",
    "Time until the deadline, in milliseconds.",
    "header",
    Annotated[int, Meta(ge=1, le=999_999_999)],
)
_PRIORITY = Parameter("x-causeway-priority", "Priority of the request.", "header", Priority)
_ROUTING = (
    *(_TAGS, _DEADLINE, _PRIORITY, _TRACE),
    Parameter(
        "x-causeway-critical",
        "Whether only the full answer of the named tier is acceptable.",
        "header",
        Literal["true", "false"],
    ),
    Parameter("x-request-id", "Id of the request in logs and answers; by default a random one.", "header"),
    Parameter(
        "Cache-Control", "`no-store`, `no-cache` or `private`: neither read nor write the shared cache.", "header"
    ),
)
_PREFER = Parameter(
    "Prefer", "`respond-async, wait=SECONDS` (RFC 7240): a request that takes longer becomes a job.", "header"
)
_PAGE = (
    Parameter("limit", "Maximum number of entries; default 20.", kind=Annotated[int, Meta(ge=1, le=MAX_PAGE)]),
    Parameter("after", "The id of the last entry of the previous page."),
)
_ANSWERED = {
    "x-request-id": "the request's id",
    "x-causeway-tier": "tier that answered",
    "x-causeway-degraded": "reason why the answer is not the first choice",
    "x-causeway-cache": "outcome in the shared cache",
    "x-causeway-modalities": "state of audio, images and files, such as `audio=ok,image=timeout`",
    "x-causeway-session": "`new`, `stayed; reason=…` or `switched; from=TIER; reason=…`; only with "
    "`degradation.sessions`",
    "x-causeway-variant": "model that answered in the place of the tier's own, for a share of the requests",
}


class GatewayHealth(Struct):
    """The body of `/healthz`."""

    status: Literal["ok"]


class GatewayReadiness(Struct):
    """The body of `/readyz`."""

    ready: bool


def gateway_document(served: Collection[str] | None = None) -> dict[str, Any]:
    """Build the document.

    Args:
        served: Paths that this gateway serves (without a Redis it has no jobs); None for all.
    """
    operations = [operation for operation in gateway_operations() if served is None or operation.path in served]
    bearer = {"description": "A static or a signed token; a gateway on loopback may need none."}
    webhooks = [job_ended_operation()] if served is None or "/v1/jobs" in served else []
    return openapi_document(
        "Causeway gateway", version("causeway-router"), operations, bearer, token_optional=True, webhooks=webhooks
    )


def gateway_operations() -> list[Operation]:
    """Return every operation of the public address of a fully configured gateway."""
    refusals = (*_IDENTITY, *_MODELS, errors.Shed)
    return [
        *generation_operations(
            "chat", _ROUTING, (_KEY, _PREFER), _ANSWERED, JobView, (*refusals, *_NAMED_FILES, *_ACCEPTANCE, *_JOB_ENDS)
        ),
        transcription_operation(
            "chat", _ROUTING, _ANSWERED, (*refusals, errors.QueueFull, errors.CloudUnreachable, errors.CloudTimeout)
        ),
        *model_operations("client", (*_IDENTITY, *_MODELS)),
        Operation(
            method="POST",
            path="/v1/feedback",
            summary="Score one of your own answers.",
            caller="client",
            request={JSON: Feedback},
            responses=(ApiResponse(200, {JSON: FeedbackReceipt}),),
            errors=(*_IDENTITY, *BODY, errors.InvalidRequest, errors.NotFound, errors.RateLimited, errors.Shed),
        ),
        realtime_operation(
            "chat",
            "The tier of the session's answers; required without `session_id`.",
            _ROUTING,
            (*_IDENTITY, errors.PermissionDenied, errors.MissingField, errors.UnknownField, errors.ModelNotAllowed),
        ),
        *_jobs(),
        *secret_operations("jobs", _JOBS),
        *stored_response_operations("chat", (*_IDENTITY, errors.PermissionDenied, errors.RateLimited, *_STORE)),
        *_files(),
        *_batches(),
        *_api_keys(),
        Operation(
            method="DELETE",
            path=ERASURE,
            summary="Erase everything that is stored of a client or an end user.",
            caller="client",
            parameters=(
                Parameter("client", "The client, with the scope `keys`; by default the caller itself."),
                Parameter("user", "The end user, with the scope `keys`: the value of `user` in requests."),
            ),
            responses=(ApiResponse(200, {JSON: SignedReceipt}),),
            errors=(*_JOBS, errors.InvalidRequest, errors.UnsupportedFeature, errors.RateLimited, ErasureConflict),
        ),
        *_health(),
        openapi_operation(OPENAPI_PATH),
    ]


def _operation(method: Literal["GET", "POST", "DELETE"], path: str, summary: str, body: Any, **more: Any) -> Operation:
    """Return an operation of the jobs API that answers with JSON of one type."""
    more = {"responses": (ApiResponse(200, {JSON: body}),), "errors": _JOBS} | more
    return Operation(method=method, path=path, summary=summary, caller="jobs", **more)


def _jobs() -> Iterator[Operation]:
    accepted = ApiResponse(202, {JSON: JobView}, "The object is stored.", {"Location": "the job"})
    yield _operation(
        "POST",
        "/v1/jobs",
        "Accept a job.",
        JobView,
        request={JSON: AnyOf((WireChat, WireCompletion), CloudJobFields)},
        parameters=(_KEY, _TAGS, _DEADLINE, _PRIORITY, _TRACE),
        responses=(accepted,),
        errors=(*_JOBS, *BODY, *_MODELS, *_NAMED_FILES, *_ACCEPTANCE),
    )
    one = (*_JOBS, errors.NotFound)
    yield _operation("GET", "/v1/jobs", "The caller's jobs, newest first.", JobList, parameters=_PAGE, errors=one)
    yield _operation("GET", "/v1/jobs/{id}", "One job, with its answer once it has ended.", JobView, errors=one)
    ended = (*one, errors.JobAlreadyEnded, errors.RateLimited)
    yield _operation("DELETE", "/v1/jobs/{id}", "Cancel a job.", JobView, errors=ended)
    summary = "Cancel the job of an `Idempotency-Key`."
    yield _operation("DELETE", "/v1/jobs", summary, JobView, parameters=(_KEY,), errors=(*ended, errors.InvalidRequest))
    yield _operation(
        "GET",
        "/v1/jobs/{id}/events",
        "A job's events until it ends.",
        None,
        parameters=(Parameter("Last-Event-ID", "Continue after this event.", "header"),),
        responses=(ApiResponse(200, {EVENTS: None}),),
        errors=(*one, errors.QueueFull),
    )


def _files() -> Iterator[Operation]:
    upload_errors = (*_FILES, errors.RateLimited, errors.Shed, FileTooLarge, QuotaExceeded)
    content = (errors.UnsupportedFeature, FileContentLost)
    yield from file_operations(
        "jobs or chat", UploadPurpose, _PAGE, (*_JOBS, *_FILES), upload_errors, content, gives_content=True
    )


def _batches() -> Iterator[Operation]:
    limits = (errors.RateLimited, errors.Shed, QuotaExceeded)
    yield _operation(
        "POST",
        "/v1/batches",
        "Run each line of a file as a job.",
        BatchView,
        request={JSON: BatchRequest},
        parameters=(_KEY, _TAGS, _TRACE),
        errors=(*_JOBS, *BODY, *_FILES, *limits, errors.NotFound, errors.ModelNotAllowed, errors.IdempotencyConflict),
    )
    one = (*_JOBS, errors.NotFound)
    summary = "The caller's batches, newest first."
    yield _operation("GET", "/v1/batches", summary, BatchList, parameters=_PAGE, errors=one)
    yield _operation("GET", "/v1/batches/{id}", "One batch.", BatchView, errors=one)
    ended = (*one, errors.JobAlreadyEnded, errors.RateLimited)
    yield _operation("POST", "/v1/batches/{id}/cancel", "Cancel a batch.", BatchView, errors=ended)


def _api_keys() -> Iterator[Operation]:
    changed = (*ANY_REQUEST, *_IDENTITY, errors.PermissionDenied, errors.RateLimited)
    operations: tuple[tuple[Literal["GET", "POST", "DELETE"], str, str, Any, Any, Errors], ...] = (
        ("POST", KEYS, "Make an API key of your tenant.", ApiKeyView, NewApiKey, BODY),
        ("GET", KEYS, "The API keys of your tenant.", ApiKeyList, None, ()),
        (
            "POST",
            f"{KEYS}/{{id}}/rotate",
            "Give an API key another secret.",
            ApiKeyView,
            Rotation,
            (*BODY, errors.NotFound),
        ),
        (
            "DELETE",
            f"{KEYS}/{{id}}",
            "Delete an API key.",
            ApiKeyDeleted,
            None,
            (errors.NotFound, errors.InvalidRequest),
        ),
    )
    for method, path, summary, body, request, more in operations:
        yield Operation(
            method=method,
            path=path,
            summary=summary,
            caller="keys",
            request={} if request is None else {JSON: request},
            responses=(ApiResponse(200, {JSON: body}),),
            errors=(*changed, *more),
        )


def _health() -> Iterator[Operation]:
    for path in ("/healthz", "/health"):
        healthy = (ApiResponse(200, {JSON: GatewayHealth}),)
        yield Operation(method="GET", path=path, summary="The process answers.", responses=healthy, errors=ANY_REQUEST)
    body = {JSON: GatewayReadiness}
    yield Operation(
        method="GET",
        path="/readyz",
        summary="Readiness: whether a tier can answer, determined by an inference.",
        responses=(ApiResponse(200, body), ApiResponse(503, body, "No tier can answer.")),
        errors=ANY_REQUEST,
    )
