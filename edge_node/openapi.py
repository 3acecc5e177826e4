"""The OpenAPI document of the daemon, which is made when the first client asks for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from causeway_server.router import errors
from causeway_server.router.anthropic.wire import WireMessages
from causeway_server.router.api.document import (
    EVENTS,
    JSON,
    OPENAPI_PATH,
    TEXT,
    AnyOf,
    ApiResponse,
    Operation,
    Parameter,
    openapi_document,
)
from causeway_server.router.api.operations import (
    ANY_REQUEST,
    BODY,
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
from causeway_server.router.errors import ResultTooLarge
from causeway_server.router.jobs.submission import JobFields
from causeway_server.router.jobs.webhooks import WebhookRefused
from causeway_server.router.numbers import MAX_PAGE
from causeway_server.router.openai.audio import WireSpeech
from causeway_server.router.openai.responses.request import WireResponse
from causeway_server.router.openai.wire import WireChat, WireCompletion, WireEmbedding
from causeway_server.router.parts.uploads import PartPurpose
from causeway_server.router.serving.console import media_type, page_files
from causeway_server.router.types import DecisionRecord, Prefer, Priority, Route
from causeway_server.router.variants.feedback import Feedback, FeedbackReceipt

from . import daemon_version
from .backends.backend import CloudJobEnded
from .console.routes import PAGE, WhatIfQuestion
from .erasure import PATH as ERASURE_PATH
from .erasure import SignedErasure
from .files.store import FileFolderUnavailable, StorageFull
from .http.api import REQUEST_HEADERS
from .http.inspection import Readiness
from .jobs.api import EdgeJobList
from .jobs.record import EdgeJobView, JobDropped, JobLost, JobNotDead, JobNotEnded, OutboxFull
from .serving.requests import Status
from .serving.service import Explanation
from .storage.decisions import MAX_QUERY_LIMIT

# The reference in ``edge_node/README.md`` is generated from this table.
RESPONSE_HEADERS: Mapping[str, str] = {
    "x-causeway-decision": "id of the decision record, see `GET /v1/decisions/{id}`",
    "x-causeway-route": "origin of the answer: `edge`, `cloud` or `cache`",
    "x-causeway-target": "name of the policy's target that made the answer",
    "x-causeway-reason": "name of the rule that chose the target, or `fallback: CODE`, `handoff: CODE`, `cache`, "
    "`stale: CODE`, `model_named`, `continued`",
    "x-causeway-cache": (
        "`hit`; `semantic` (the answer to an earlier question with the same meaning); "
        "`stale` (an old answer after an error); `miss`; `coalesced` (shared with an "
        "identical request in progress); `bypass` (the policy allows no caching)"
    ),
    "x-causeway-cache-reason": "reason why the cache was bypassed; only with `x-causeway-cache: bypass`",
    "x-causeway-policy": "`name@revision` of the active policy",
    "x-causeway-degraded": (
        "`true` if the answer is not the policy's first choice: a fallback, a stale answer or a lower cloud tier"
    ),
    "x-causeway-modalities": (
        "state of the parts that the target received as text or soft tokens, such "
        "as `audio=ok,image=timeout`: `ok`, `timeout`, `failed`, or `skipped` (the "
        "policy waits for the first branch only); for parts that a cloud target "
        "received, the states that the gateway reports"
    ),
    "x-causeway-loosened": (
        "offered tools, separated by commas, whose arguments are not constrained to their schemas, because a keyword "
        "is not supported; the decision record names it"
    ),
    "x-causeway-trimmed": "number of the oldest messages that were left out, because the chat exceeds the context "
    "(`context.overflow` of the policy)",
    "x-causeway-session": "`new`, `stayed; reason=…` or `switched; from=TARGET; reason=…`; only under a policy with "
    "`session`",
    "x-causeway-variant": "model that answered instead of the target's own, for a share of the requests",
    "x-request-id": "same as `x-causeway-decision`; a separate id if a request is refused before its decision",
    "Preference-Applied": "`respond-async`: the request was accepted as a job",
    "Retry-After": "seconds to wait before a retry, on 429 and 503",
}
CLIENT = "client"  # needs an API key if `server.keys` lists any
_AUTH = (errors.AuthenticationFailed,)
_KINDS: dict[str, Any] = {
    "x-causeway-prefer": Prefer,
    "x-causeway-deadline-ms": Annotated[int, Meta(ge=1, le=999_999_999)],
    "x-causeway-priority": Priority,
}
_JOB_HEADERS = ("x-causeway-priority", "Idempotency-Key")
_ROUTING = tuple(
    Parameter(name, meaning, "header", _KINDS.get(name, str))
    for name, meaning in REQUEST_HEADERS.items()
    if name not in ("Authorization", "x-api-key", "anthropic-version", "Prefer", *_JOB_HEADERS)
)
_FOR_JOBS = tuple(Parameter(name, REQUEST_HEADERS[name], "header", _KINDS.get(name, str)) for name in _JOB_HEADERS)
_PREFER = Parameter("Prefer", REQUEST_HEADERS["Prefer"], "header")
_DECIDED = {name: meaning for name, meaning in RESPONSE_HEADERS.items() if name != "Retry-After"}
_BACKENDS = (
    *(*_AUTH, errors.NoRoute, errors.AllAttemptsFailed, errors.TargetNotConfigured, errors.EncoderFailed),
    *(errors.BackendError, errors.EngineCrashed, errors.CloudUnavailable),
)
_PAGE = (
    Parameter("limit", "Maximum number of entries; default 20.", kind=Annotated[int, Meta(ge=1, le=MAX_PAGE)]),
    Parameter("after", "The id of the last entry of the previous page."),
)
_JOB_STORE = (errors.JobStoreUnavailable,)
_NAMED_FILES = (errors.NotFound, FileFolderUnavailable)  # responses to requests that name uploaded files
_ACCEPTANCE = (*_JOB_STORE, errors.IdempotencyConflict, OutboxFull)
_JOB_ENDS = (JobDropped, JobLost, ResultTooLarge, CloudJobEnded, errors.JobCancelled)


class HealthReport(Struct):
    """The body of `/healthz`."""

    status: Literal["ok"]
    uptime_s: float


class DecisionList(Struct):
    """The body of `/v1/decisions`, the newest record first."""

    object: Literal["list"]
    data: list[DecisionRecord]


def edge_document() -> dict[str, Any]:
    """Return the document. It is the same for each daemon of this version."""
    bearer = {"description": "An API key of `server.keys`; not needed if no keys are configured."}
    webhooks = [job_ended_operation()]
    return openapi_document(
        "Causeway edge", daemon_version(), edge_operations(), bearer, token_optional=True, webhooks=webhooks
    )


def edge_operations() -> list[Operation]:
    """Return every operation that the daemon serves."""
    job_errors = (*_NAMED_FILES, *_ACCEPTANCE, *_JOB_ENDS)
    return [
        *generation_operations(
            CLIENT, _ROUTING, (*_FOR_JOBS, _PREFER), _DECIDED, EdgeJobView, (*_BACKENDS, *job_errors)
        ),
        *_decisions(),
        *model_operations(CLIENT, _AUTH),
        *_jobs(),
        *secret_operations(CLIENT, (*ANY_REQUEST, *_AUTH, *_JOB_STORE)),
        *stored_response_operations(CLIENT, (*_AUTH, *_JOB_STORE)),
        *_files(),
        _operation(
            "DELETE",
            ERASURE_PATH,
            "Erase everything that this device stores of a client.",
            SignedErasure,
            parameters=(Parameter("client", "The client, with the right `erasure`; by default the caller itself."),),
            errors=(*ANY_REQUEST, *_AUTH, *_JOB_STORE, FileFolderUnavailable, errors.PermissionDenied),
        ),
        *_audio(),
        realtime_operation(
            CLIENT,
            "The model of the session's answers; default `auto`. Not read with `session_id`.",
            _ROUTING,
            (*_AUTH, errors.UnknownField),
        ),
        *_console(),
        *_health(),
        openapi_operation(OPENAPI_PATH),
    ]


def _operation(method: Literal["GET", "POST", "DELETE"], path: str, summary: str, body: Any, **more: Any) -> Operation:
    """Return an operation for clients that answers with JSON of one type."""
    more = {"responses": (ApiResponse(200, {JSON: body}),), "errors": (*ANY_REQUEST, *_AUTH)} | more
    return Operation(method=method, path=path, summary=summary, caller=CLIENT, **more)


def _open(path: str, summary: str, *responses: ApiResponse, **more: Any) -> Operation:
    """Return an operation that needs no key."""
    return Operation(method="GET", path=path, summary=summary, responses=responses, errors=ANY_REQUEST, **more)


def _decisions() -> Iterator[Operation]:
    yield _operation(
        "POST",
        "/v1/route",
        "Decide a request of any kind without running it.",
        Explanation,
        request={JSON: AnyOf((WireChat, WireCompletion, WireEmbedding, WireResponse, WireMessages))},
        parameters=_ROUTING,
        errors=(
            *(*ANY_REQUEST, *BODY, *_AUTH, *_NAMED_FILES),
            *(errors.RateLimited, errors.ModelNotFound, errors.Draining),
        ),
    )
    yield _operation(
        "GET",
        "/v1/decisions",
        "Records of past requests, without their content.",
        DecisionList,
        errors=(*ANY_REQUEST, *_AUTH, errors.PermissionDenied),
        parameters=(
            Parameter("route", "Origin of the answer.", kind=Route),
            Parameter("target", "Name of the policy's target."),
            Parameter("status", "Result of the request.", kind=Status),
            Parameter(
                "client", "Name of an API key; the name of another key than the caller's needs the right `decisions`."
            ),
            Parameter("since", "Time in Unix seconds.", kind=Annotated[float, Meta(ge=0)]),
            Parameter(
                "limit", "Maximum number of entries; default 100.", kind=Annotated[int, Meta(ge=1, le=MAX_QUERY_LIMIT)]
            ),
        ),
    )
    responses = (*ANY_REQUEST, *_AUTH, errors.NotFound)
    yield _operation(
        "POST",
        "/v1/feedback",
        "Score one of your own answers.",
        FeedbackReceipt,
        request={JSON: Feedback},
        errors=(*responses, *BODY, errors.RateLimited, errors.Draining),
    )
    yield _operation("GET", "/v1/decisions/{id}", "The record of one request.", DecisionRecord, errors=responses)


def _jobs() -> Iterator[Operation]:
    responses = (*ANY_REQUEST, *_AUTH, *_JOB_STORE, errors.NotFound)
    yield _operation(
        "POST",
        "/v1/jobs",
        "Accept a job, also while the cloud is unreachable.",
        EdgeJobView,
        request={JSON: AnyOf((WireChat, WireCompletion), JobFields)},
        parameters=(*_ROUTING, *_FOR_JOBS),
        responses=(ApiResponse(202, {JSON: EdgeJobView}, "The job is on the disk.", {"Location": "the job"}),),
        errors=(
            *(*ANY_REQUEST, *BODY, *_AUTH, *_ACCEPTANCE, errors.RateLimited, errors.ModelNotFound, errors.Draining),
            *(errors.NoRoute, WebhookRefused, *_NAMED_FILES),
        ),
    )
    yield _operation(
        "GET", "/v1/jobs", "The caller's jobs, newest first.", EdgeJobList, parameters=_PAGE, errors=responses
    )
    yield _operation(
        "GET", "/v1/jobs/{id}", "One job, with its answer once it has ended.", EdgeJobView, errors=responses
    )
    ended = (*responses, errors.JobAlreadyEnded)
    yield _operation("DELETE", "/v1/jobs/{id}", "Cancel a job.", EdgeJobView, errors=ended)
    yield _operation(
        "GET",
        "/v1/jobs/{id}/events",
        "A job's states and the text of its answer while it is made.",
        None,
        parameters=(Parameter("Last-Event-ID", "Continue after this event.", "header"),),
        responses=(ApiResponse(200, {EVENTS: None}),),
        errors=(*responses, errors.QueueFull),
    )
    for action, summary, error in (
        ("retry", "Run a dead letter again.", JobNotDead),
        ("purge", "Delete a job that has ended.", JobNotEnded),
    ):
        yield _operation("POST", f"/v1/jobs/{{id}}/{action}", summary, EdgeJobView, errors=(*responses, error))


def _files() -> Iterator[Operation]:
    common = (*ANY_REQUEST, *_AUTH, FileFolderUnavailable)
    content = (errors.UnsupportedFeature,)
    yield from file_operations(CLIENT, PartPurpose, _PAGE, common, (StorageFull,), content, gives_content=False)


def _audio() -> Iterator[Operation]:
    yield transcription_operation(CLIENT, _ROUTING, _DECIDED, (*_AUTH, errors.NoRoute))
    yield _operation(
        "POST",
        "/v1/audio/speech",
        "Speak a text.",
        None,
        request={JSON: WireSpeech},
        parameters=_ROUTING,
        responses=(ApiResponse(200, {"audio/wav": None, "audio/pcm": None}, headers=_DECIDED),),
        errors=(
            *(*ANY_REQUEST, *BODY, *_AUTH, errors.ModelNotFound, errors.NoRoute, errors.RateLimited, errors.Draining),
            *(errors.DeadlineExceeded, errors.EncoderFailed),
        ),
    )


def _console() -> Iterator[Operation]:
    etag = Parameter("If-None-Match", "The ETag of the file that the browser has.", "header")
    for path, file in page_files(PAGE).items():
        yield _open(
            path,
            "A file of the console, the same for everyone.",
            ApiResponse(200, {media_type(file): None}),
            ApiResponse(304, meaning="The file has not changed."),
            parameters=(etag,),
        )
    yield _operation("GET", "/console/state", "The device's present state.", dict[str, object])
    yield _operation(
        "POST",
        "/console/what-if",
        "Decide a recorded request again with other signals, without running it.",
        dict[str, object],
        request={JSON: WhatIfQuestion},
        errors=(*ANY_REQUEST, *BODY, *_AUTH, errors.NotFound),
    )


def _health() -> Iterator[Operation]:
    for path in ("/healthz", "/health"):
        yield _open(path, "Liveness: the daemon routes requests.", ApiResponse(200, {JSON: HealthReport}))
    ready = {JSON: Readiness}
    unready = ApiResponse(503, ready, "No target can answer.")
    yield _open("/readyz", "Readiness: whether a target can answer.", ApiResponse(200, ready), unready)
    yield _open("/metrics", "Metrics for Prometheus.", ApiResponse(200, {TEXT: None}))
