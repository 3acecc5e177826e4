"""The OpenAPI document of the daemon, made when the first client asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from router import errors
from router.api import (
    EVENTS,
    FORM,
    JSON,
    OPENAPI_PATH,
    TEXT,
    AnyOf,
    ApiResponse,
    Operation,
    Parameter,
    openapi_document,
)
from router.api.generation import (
    ANY_REQUEST,
    BODY,
    generation_operations,
    model_operations,
    openapi_operation,
    realtime_operation,
)
from router.jobs.submission import Priority
from router.openai.audio.speech import WireSpeech
from router.openai.audio.transcription import TranscriptFormat
from router.openai.responses.wire import WireResponse
from router.openai.wire import WireChat, WireCompletion, WireEmbedding
from router.types import DecisionRecord, Prefer, Route

from .backends.backend import CloudJobEnded
from .console.routes import WhatIfQuestion, media_type, page_files
from .http.api import Readiness
from .http.headers import REQUEST_HEADERS, RESPONSE_HEADERS
from .jobs.api import MOST_LISTED, JobList
from .jobs.errors import JobDropped, JobLost, JobNotDead, JobNotEnded, OutboxFull, ResultTooLarge
from .jobs.record import EdgeJobFields, EdgeJobView
from .serving.request_context import Status
from .serving.service import Explanation
from .storage.decisions import MAX_QUERY_LIMIT
from .version import daemon_version

CLIENT = "client"  # needs an API key where `server.keys` names some
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
    if name not in ("Authorization", "Prefer", *_JOB_HEADERS)
)
_FOR_JOBS = tuple(Parameter(name, REQUEST_HEADERS[name], "header", _KINDS.get(name, str)) for name in _JOB_HEADERS)
_PREFER = Parameter("Prefer", REQUEST_HEADERS["Prefer"], "header")
_DECIDED = {name: meaning for name, meaning in RESPONSE_HEADERS.items() if name != "Retry-After"}
_BACKENDS = (
    *(*_AUTH, errors.NoRoute, errors.AllAttemptsFailed, errors.TargetNotConfigured, errors.EncoderFailed),
    *(errors.BackendError, errors.EngineCrashed, errors.CloudUnavailable),
)
_JOB_STORE = (errors.JobStoreUnavailable,)
_ACCEPTANCE = (*_JOB_STORE, errors.IdempotencyConflict, OutboxFull)
_JOB_ENDS = (JobDropped, JobLost, ResultTooLarge, CloudJobEnded, errors.JobCancelled)
_JOB = {JSON: EdgeJobView}


class HealthReport(Struct):
    """The body of `/healthz`."""

    status: Literal["ok"]
    uptime_s: float


class DecisionList(Struct):
    """The body of `/v1/decisions`, the newest record first."""

    object: Literal["list"]
    data: list[DecisionRecord]


class TranscriptionForm(Struct):
    """The form of `POST /v1/audio/transcriptions`."""

    file: Annotated[str, Meta(extra_json_schema={"contentMediaType": "application/octet-stream"})]
    model: Annotated[str, Meta(max_length=64)]
    language: str = ""
    prompt: Annotated[str, Meta(max_length=1000)] = ""
    response_format: TranscriptFormat = "json"
    temperature: Annotated[float, Meta(ge=0, le=1)] = 0.0
    stream: bool = False
    granularities: Literal["segment"] = field(name="timestamp_granularities[]", default="segment")


class TranscriptBody(Struct):
    """The words of a sound; with `verbose_json` also its language, length and segments."""

    text: str


def edge_document() -> dict[str, Any]:
    """Return the document. It is the same for each daemon of this version."""
    bearer = {"description": "An API key of `server.keys`; without keys none is needed."}
    return openapi_document("Causeway edge", daemon_version(), edge_operations(), bearer, token_optional=True)


def edge_operations() -> list[Operation]:
    """Return every operation that the daemon serves."""
    job_errors = (*_ACCEPTANCE, *_JOB_ENDS)
    return [
        *generation_operations(
            CLIENT, _ROUTING, (*_FOR_JOBS, _PREFER), _DECIDED, EdgeJobView, (*_BACKENDS, *job_errors)
        ),
        *_decisions(),
        *model_operations(CLIENT, _AUTH),
        *_jobs(),
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


def _decisions() -> Iterator[Operation]:
    any_body = AnyOf((WireChat, WireCompletion, WireEmbedding, WireResponse))
    yield Operation(
        method="POST",
        path="/v1/route",
        summary="Decide a request of any kind without running it.",
        caller=CLIENT,
        request={JSON: any_body},
        parameters=_ROUTING,
        responses=(ApiResponse(200, {JSON: Explanation}),),
        errors=(*ANY_REQUEST, *BODY, *_AUTH, errors.RateLimited, errors.ModelNotFound, errors.Draining),
    )
    yield Operation(
        method="GET",
        path="/v1/decisions",
        summary="Records of past requests, without their content.",
        caller=CLIENT,
        parameters=(
            Parameter("route", "Where the answer came from.", kind=Route),
            Parameter("target", "The policy's target."),
            Parameter("status", "How the request ended.", kind=Status),
            Parameter("since", "Unix seconds.", kind=Annotated[float, Meta(ge=0)]),
            Parameter("limit", "At most so many; default 100.", kind=Annotated[int, Meta(ge=1, le=MAX_QUERY_LIMIT)]),
        ),
        responses=(ApiResponse(200, {JSON: DecisionList}),),
        errors=(*ANY_REQUEST, *_AUTH),
    )
    yield Operation(
        method="GET",
        path="/v1/decisions/{id}",
        summary="The record of one request.",
        caller=CLIENT,
        responses=(ApiResponse(200, {JSON: DecisionRecord}),),
        errors=(*ANY_REQUEST, *_AUTH, errors.NotFound),
    )


def _jobs() -> Iterator[Operation]:
    one = (*ANY_REQUEST, *_AUTH, *_JOB_STORE, errors.NotFound)
    yield Operation(
        method="POST",
        path="/v1/jobs",
        summary="Accept a job, also while the cloud is away.",
        caller=CLIENT,
        request={JSON: AnyOf((WireChat, WireCompletion), EdgeJobFields)},
        parameters=(*_ROUTING, *_FOR_JOBS),
        responses=(ApiResponse(202, _JOB, "The job is on the disk.", {"Location": "the job"}),),
        errors=(
            *(*ANY_REQUEST, *BODY, *_AUTH, *_ACCEPTANCE, errors.RateLimited, errors.ModelNotFound, errors.Draining),
            errors.NoRoute,
        ),
    )
    yield Operation(
        method="GET",
        path="/v1/jobs",
        summary="The caller's jobs, newest first.",
        caller=CLIENT,
        parameters=(
            Parameter("limit", "At most so many; default 20.", kind=Annotated[int, Meta(ge=1, le=MOST_LISTED)]),
            Parameter("after", "The id of the last job of the page before."),
        ),
        responses=(ApiResponse(200, {JSON: JobList}),),
        errors=one,
    )
    yield Operation(
        method="GET",
        path="/v1/jobs/{id}",
        summary="One job, with its answer once it has ended.",
        caller=CLIENT,
        responses=(ApiResponse(200, _JOB),),
        errors=one,
    )
    yield Operation(
        method="DELETE",
        path="/v1/jobs/{id}",
        summary="Cancel a job.",
        caller=CLIENT,
        responses=(ApiResponse(200, _JOB),),
        errors=(*one, errors.JobAlreadyEnded),
    )
    yield Operation(
        method="GET",
        path="/v1/jobs/{id}/events",
        summary="A job's states and the text of its answer while it is made.",
        caller=CLIENT,
        parameters=(Parameter("Last-Event-ID", "Continue after this event.", "header"),),
        responses=(ApiResponse(200, {EVENTS: None}),),
        errors=(*one, errors.QueueFull),
    )
    for action, summary, error in (
        ("retry", "Run a dead letter again.", JobNotDead),
        ("purge", "Delete a job that has ended.", JobNotEnded),
    ):
        yield Operation(
            method="POST",
            path=f"/v1/jobs/{{id}}/{action}",
            summary=summary,
            caller=CLIENT,
            responses=(ApiResponse(200, _JOB),),
            errors=(*one, error),
        )


def _audio() -> Iterator[Operation]:
    failures = (
        *(*ANY_REQUEST, *BODY, *_AUTH, errors.ModelNotFound, errors.NoRoute, errors.RateLimited, errors.Draining),
        *(errors.DeadlineExceeded, errors.EncoderFailed),
    )
    yield Operation(
        method="POST",
        path="/v1/audio/transcriptions",
        summary="The words of a sound.",
        caller=CLIENT,
        request={FORM: TranscriptionForm},
        parameters=_ROUTING,
        responses=(ApiResponse(200, {JSON: TranscriptBody, TEXT: str, EVENTS: None}, headers=_DECIDED),),
        errors=failures,
    )
    yield Operation(
        method="POST",
        path="/v1/audio/speech",
        summary="Speak a text.",
        caller=CLIENT,
        request={JSON: WireSpeech},
        parameters=_ROUTING,
        responses=(ApiResponse(200, {"audio/wav": None, "audio/pcm": None}, headers=_DECIDED),),
        errors=failures,
    )


def _console() -> Iterator[Operation]:
    for path, file in page_files().items():
        yield Operation(
            method="GET",
            path=path,
            summary="A file of the console, the same for everyone.",
            parameters=(Parameter("If-None-Match", "The ETag of the file that the browser has.", "header"),),
            responses=(ApiResponse(200, {media_type(file): None}), ApiResponse(304, meaning="It has not changed.")),
            errors=ANY_REQUEST,
        )
    yield Operation(
        method="GET",
        path="/console/state",
        summary="The box at this moment.",
        caller=CLIENT,
        responses=(ApiResponse(200, {JSON: dict[str, object]}),),
        errors=(*ANY_REQUEST, *_AUTH),
    )
    yield Operation(
        method="POST",
        path="/console/what-if",
        summary="Decide a recorded request anew, with other signals; nothing is run.",
        caller=CLIENT,
        request={JSON: WhatIfQuestion},
        responses=(ApiResponse(200, {JSON: dict[str, object]}),),
        errors=(*ANY_REQUEST, *BODY, *_AUTH, errors.NotFound),
    )


def _health() -> Iterator[Operation]:
    for path in ("/healthz", "/health"):
        yield Operation(
            method="GET",
            path=path,
            summary="The daemon routes requests.",
            responses=(ApiResponse(200, {JSON: HealthReport}),),
            errors=ANY_REQUEST,
        )
    ready = {JSON: Readiness}
    yield Operation(
        method="GET",
        path="/readyz",
        summary="Whether a target can answer.",
        responses=(ApiResponse(200, ready), ApiResponse(503, ready, "No target can answer.")),
        errors=ANY_REQUEST,
    )
    yield Operation(
        method="GET",
        path="/metrics",
        summary="Metrics for Prometheus.",
        responses=(ApiResponse(200, {TEXT: None}),),
        errors=ANY_REQUEST,
    )
