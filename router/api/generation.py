"""OpenAI's operations at the edge and at the gateway: chats, completions, embeddings, responses and models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from .. import errors
from ..errors import CausewayError
from ..openai.answer import ModelList, ModelObject
from ..openai.embeddings import EncodedVectors
from ..openai.responses.request import WireResponse
from ..openai.wire import WireChat, WireCompletion, WireEmbedding
from .answers import ChatCompletion, ChatCompletionChunk, ResponseEvent, ResponseObject, TextCompletion
from .operation import EVENTS, JSON, ApiResponse, Operation, Parameter

Errors = tuple[type[CausewayError], ...]

ANY_REQUEST: Final[Errors] = (
    errors.InvalidRequest,
    errors.MisdirectedRequest,
    errors.OriginNotAllowed,
    errors.CausewayError,
)
"""What any request may get: it is no valid HTTP, has a misspelt header or a foreign `Host`, is a foreign web page's, or
the program failed."""
BODY: Final[Errors] = (
    errors.InvalidJSON,
    errors.MissingField,
    errors.UnknownField,
    errors.UnsupportedFeature,
    errors.BodyTooLarge,
    errors.RequestTimeout,
    errors.UnsupportedMediaType,
    errors.QueueFull,
)
_GENERATION: Final[Errors] = (
    errors.ContextLengthExceeded,
    errors.InvalidGrammar,
    errors.ModelNotFound,
    errors.RateLimited,
    errors.Draining,
    errors.DeadlineExceeded,
    errors.EngineUnavailable,
    errors.EngineOutOfMemory,
    errors.EngineTimeout,
    errors.CloudUnreachable,
    errors.CloudTimeout,
    errors.CloudSaturated,
    errors.CloudRejected,
    errors.CloudFailed,
    errors.StreamBroken,
    errors.BreakerOpen,
)

_CHAT: Final = {JSON: ChatCompletion, EVENTS: ChatCompletionChunk}
_COMPLETION: Final = {JSON: TextCompletion, EVENTS: TextCompletion}
_RESPONSE: Final = {JSON: ResponseObject, EVENTS: ResponseEvent}


def generation_operations(
    caller: str,
    parameters: tuple[Parameter, ...],
    job_parameters: tuple[Parameter, ...],
    headers: Mapping[str, str],
    job: Any,
    more_errors: Errors,
) -> list[Operation]:
    """Return the operations that generate.

    Args:
        caller: The client that may call them.
        parameters: The headers that each takes.
        job_parameters: The headers that make a job of a request.
        headers: Those of each answer, with their meaning.
        job: The type of a job's view.
        more_errors: What each sends beside the errors of both servers.
    """
    failures = (*ANY_REQUEST, *BODY, *_GENERATION, *more_errors)
    as_job = ApiResponse(202, {JSON: job}, "It became a job (`Prefer: respond-async`).", {"Location": "the job"})

    def operation(path: str, summary: str, body: type, content: Mapping[str, Any]) -> Operation:
        answer = ApiResponse(200, content, "The answer; events if the body has `stream`: true.", headers)
        return Operation(
            method="POST",
            path=path,
            summary=summary,
            caller=caller,
            request={JSON: body},
            parameters=(*parameters, *job_parameters),
            responses=(answer, as_job),
            errors=failures,
        )

    return [
        operation("/v1/chat/completions", "Answer a chat.", WireChat, _CHAT),
        operation("/v1/completions", "Continue a text.", WireCompletion, _COMPLETION),
        operation("/v1/embeddings", "Make vectors.", WireEmbedding, {JSON: EncodedVectors}),
        operation("/v1/responses", "Answer as a Response object.", WireResponse, _RESPONSE),
    ]


def model_operations(caller: str, more_errors: Errors) -> list[Operation]:
    """Return the operations that list models. `more_errors`: as for the operations that generate."""
    failures = (*ANY_REQUEST, *more_errors)
    listed, one = (ApiResponse(200, {JSON: kind}) for kind in (ModelList, ModelObject))
    return [
        Operation(
            method="GET",
            path="/v1/models",
            summary="The models that the caller may name.",
            caller=caller,
            responses=(listed,),
            errors=failures,
        ),
        Operation(
            method="GET",
            path="/v1/models/{id}",
            summary="One model.",
            caller=caller,
            responses=(one,),
            errors=(*failures, errors.ModelNotFound),
        ),
    ]


def realtime_operation(caller: str, model: str, parameters: tuple[Parameter, ...], more_errors: Errors) -> Operation:
    """Return the operation that opens or resumes a live session. `model`: the meaning of that parameter."""
    return Operation(
        method="GET",
        path="/v1/realtime",
        summary="Open or resume a live session, with the event names of OpenAI's Realtime API.",
        caller=caller,
        protocol="websocket",
        parameters=(
            Parameter("model", model),
            Parameter("session_id", "Resume this session; `model` is then not read."),
            Parameter("after", "With `session_id`: the sequence number of the last event received."),
            *parameters,
        ),
        responses=(ApiResponse(101, meaning="The connection speaks WebSocket (version 13, subprotocol `realtime`)."),),
        errors=(
            *(*ANY_REQUEST, errors.ModelNotFound, errors.QueueFull, errors.Draining),
            *more_errors,
        ),
    )


def openapi_operation(path: str) -> Operation:
    """Return the operation that serves the document itself."""
    return Operation(
        method="GET",
        path=path,
        summary="This document.",
        responses=(ApiResponse(200, {JSON: dict[str, object]}),),
        errors=ANY_REQUEST,
    )
