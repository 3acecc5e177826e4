"""The operations that edge and gateway have in common, with the bodies of their answers.

OpenAI's chats, completions, embeddings, responses, models, transcriptions and files, live sessions, and the webhooks of
jobs. The bodies are as the encoders in `router.openai` write them; they are for documents only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct, defstruct, field

from .. import errors
from ..anthropic.replies import COUNT_TOKENS, MESSAGES, FaultDocument, ModelPage, TokenCount
from ..anthropic.replies import ModelInfo as ListedModel
from ..anthropic.wire import WireCountTokens, WireMessages
from ..errors import CausewayError
from ..jobs.job import WebhookSecrets
from ..jobs.webhooks import CLOUD_EVENT_JSON, EndedJob, JobCloudEvent, StandardPayload
from ..openai.answer import AnswerCall, AnswerCallDelta, AnswerToken, AnswerUsage, ModelList, ModelObject
from ..openai.audio import TranscriptFormat
from ..openai.completions import CompletionLogprobs
from ..openai.embeddings import EncodedVectors
from ..openai.responses.compaction import COMPACT_PATH, WireCompaction
from ..openai.responses.request import WireResponse
from ..openai.responses.state import NotEnded, StoredConversation, WireConversation, WireItems
from ..openai.tokens import DETOKENIZE, TOKENIZE, DetokenizedText, TokenList, WireDetokenize, WireTokenize
from ..openai.wire import WireChat, WireCompletion, WireEmbedding
from ..types import FinishReason
from .document import EVENTS, FORM, JSON, TEXT, AnyOf, ApiResponse, Operation, Parameter


class ContinueToken(msgspec.Struct):
    """Our own field of a truncated answer: send the token as `causeway.continue` to get the rest."""

    resume: str = msgspec.field(name="continue")


class ChatLogprobs(msgspec.Struct):
    content: list[AnswerToken]
    refusal: None


class ChatMessage(msgspec.Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str = ""
    tool_calls: list[AnswerCall] = []


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletion(msgspec.Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: AnswerUsage
    causeway: ContinueToken | None = None


class ChatDelta(msgspec.Struct):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    refusal: str = ""
    reasoning_content: str = ""
    tool_calls: list[AnswerCallDelta] = []


class ChatDeltaChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletionChunk(msgspec.Struct):
    """The data of an event of a stream, which ends with `[DONE]`, or with an error's object."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatDeltaChoice]
    usage: AnswerUsage | None = None
    causeway: ContinueToken | None = None


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class TextCompletion(msgspec.Struct):
    """A legacy completion, or an event of its stream; the last event has `usage` if the client requested it."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: AnswerUsage | None = None
    causeway: ContinueToken | None = None


class ResponseObject(msgspec.Struct):
    """OpenAI's Response object; it repeats further fields of its request."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    model: str
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    causeway: ContinueToken | None = None


class CompactedResponse(msgspec.Struct):
    """A compacted response: `output` takes the place of the items that it was made from."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[dict[str, Any]]
    usage: dict[str, Any]


class ResponseEvent(msgspec.Struct):
    """The data of an event of a response's stream; `type` is the event's name and determines the other fields."""

    type: str
    sequence_number: int


class MessageObject(msgspec.Struct):
    """Anthropic's Message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"]
    stop_sequence: str | None
    usage: dict[str, Any]
    causeway: ContinueToken | None = None


class MessageEvent(msgspec.Struct):
    """The data of an event of a message's stream; `type` is the event's name and determines the other fields."""

    type: str


Errors = tuple[type[CausewayError], ...]

ANY_REQUEST: Final[Errors] = (
    errors.InvalidRequest,
    errors.MisdirectedRequest,
    errors.OriginNotAllowed,
    errors.CausewayError,
)
"""The errors that any request may get: it is not valid HTTP, has a misspelt header or a foreign `Host`, comes from a
foreign web page, or the server failed internally.
"""
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
_MESSAGE: Final = {JSON: MessageObject, EVENTS: MessageEvent}
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
        headers: The headers of each answer, with their meaning.
        job: The type of a job's view.
        more_errors: The errors that each sends beside those of both servers.
    """
    failures = (*ANY_REQUEST, *BODY, *_GENERATION, *more_errors)
    as_job = ApiResponse(
        202, {JSON: job}, "The request became a job (`Prefer: respond-async`).", {"Location": "the job"}
    )

    def operation(
        path: str, summary: str, body: type, content: Mapping[str, Any], fault: type[msgspec.Struct] | None = None
    ) -> Operation:
        answer = ApiResponse(200, content, "The answer; events if the body has `stream`: true.", headers)
        taken = (*parameters, *job_parameters)
        return Operation("POST", path, summary, caller, {JSON: body}, taken, (answer, as_job), failures, fault)

    def counting(
        path: str, summary: str, body: type, kind: type, fault: type[msgspec.Struct] | None = None
    ) -> Operation:
        found = (ApiResponse(200, {JSON: kind}),)
        return Operation("POST", path, summary, caller, {JSON: body}, parameters, found, failures, fault)

    count = "Count the tokens of a message's prompt without running it."
    return [
        operation("/v1/chat/completions", "Answer a chat.", WireChat, _CHAT),
        operation("/v1/completions", "Continue a text.", WireCompletion, _COMPLETION),
        operation("/v1/embeddings", "Compute embedding vectors.", WireEmbedding, {JSON: EncodedVectors}),
        operation("/v1/responses", "Answer as a Response object.", WireResponse, _RESPONSE),
        Operation(
            "POST",
            COMPACT_PATH,
            "Summarize a conversation as an item that takes its place.",
            caller,
            {JSON: WireCompaction},
            parameters,
            (ApiResponse(200, {JSON: CompactedResponse}, headers=headers),),
            failures,
        ),
        operation(MESSAGES, "Answer as Anthropic's Message.", WireMessages, _MESSAGE, FaultDocument),
        counting(COUNT_TOKENS, count, WireCountTokens, TokenCount, FaultDocument),
        counting(TOKENIZE, "The tokens of a prompt or of a chat.", WireTokenize, TokenList),
        counting(DETOKENIZE, "The text of tokens.", WireDetokenize, DetokenizedText),
    ]


class StoredItems(msgspec.Struct):
    """A page of items of a response or a conversation."""

    data: list[dict[str, Any]]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


class DeletedObject(msgspec.Struct):
    id: str
    object: str
    deleted: bool


def stored_response_operations(caller: str, more_errors: Errors) -> Iterator[Operation]:
    """Yield the operations on stored responses and conversations. `more_errors`: of each, beside those of any."""
    page = (
        Parameter("limit", "Maximum number of items; default 20.", kind=Annotated[int, Meta(ge=1, le=100)]),
        Parameter("after", "The id of the last item of the previous page."),
        Parameter("order", "The order of the items; default `desc`, the newest first.", kind=Literal["asc", "desc"]),
    )
    follow = (
        Parameter("stream", "`true`: follow a response in the background."),
        Parameter("starting_after", "With `stream`: the number of the last event received."),
    )

    def one(method: Literal["GET", "POST", "DELETE"], path: str, summary: str, kind: Any, **more: Any) -> Operation:
        errors_of = (*ANY_REQUEST, errors.NotFound, *more_errors, *more.pop("errors", ()))
        answer = more.pop("answer", {JSON: kind})
        return Operation(method, path, summary, caller, responses=(ApiResponse(200, answer),), errors=errors_of, **more)

    posted = (*BODY, errors.RateLimited, errors.Draining)
    response, talk = "/v1/responses/{id}", "/v1/conversations/{id}"
    streamed: Any = {"answer": _RESPONSE, "parameters": follow, "errors": (errors.QueueFull, errors.UnsupportedFeature)}
    yield one("GET", response, "A stored response.", ResponseObject, **streamed)
    ended = (errors.JobAlreadyEnded,)
    yield one("DELETE", response, "Delete a response.", DeletedObject, errors=ended)
    cancelled: Any = {"errors": (*ended, errors.RateLimited, errors.Draining)}
    yield one("POST", f"{response}/cancel", "Cancel a response in the background.", ResponseObject, **cancelled)
    yield one("GET", f"{response}/input_items", "The items that it was made from.", StoredItems, parameters=page)
    made: Any = {"request": {JSON: WireConversation}, "errors": posted}
    yield one("POST", "/v1/conversations", "Create a conversation.", StoredConversation, **made)
    yield one("GET", talk, "A conversation.", StoredConversation)
    yield one("POST", talk, "Replace a conversation's metadata.", StoredConversation, **made)
    yield one("DELETE", talk, "Delete a conversation with its responses.", DeletedObject)
    yield one("GET", f"{talk}/items", "The items of a conversation.", StoredItems, parameters=page, errors=(NotEnded,))
    added: Any = {"request": {JSON: WireItems}, "errors": posted}
    yield one("POST", f"{talk}/items", "Add items to a conversation.", StoredItems, **added)
    yield one("GET", f"{talk}/items/{{item_id}}", "One item of a conversation.", dict[str, object])
    yield one("DELETE", f"{talk}/items/{{item_id}}", "Delete an item of a conversation.", StoredConversation)


def model_operations(caller: str, more_errors: Errors) -> list[Operation]:
    """Return the operations that list models. `more_errors`: as for the operations that generate."""
    failures = (*ANY_REQUEST, *more_errors)
    listed = ApiResponse(200, {JSON: AnyOf((ModelList, ModelPage))})
    one = ApiResponse(200, {JSON: AnyOf((ModelObject, ListedModel))})
    return [
        Operation(
            "GET", "/v1/models", "The models that the caller may name.", caller, responses=(listed,), errors=failures
        ),
        Operation(
            "GET", "/v1/models/{id}", "One model.", caller, responses=(one,), errors=(*failures, errors.ModelNotFound)
        ),
    ]


def realtime_operation(caller: str, model: str, parameters: tuple[Parameter, ...], more_errors: Errors) -> Operation:
    """Return the operation that opens or resumes a live session. `model`: the meaning of that parameter."""
    return Operation(
        "GET",
        "/v1/realtime",
        "Open or resume a live session, with the event names of OpenAI's Realtime API.",
        caller,
        protocol="websocket",
        parameters=(
            Parameter("model", model),
            Parameter("session_id", "Resume this session; `model` is then not read."),
            Parameter("after", "With `session_id`: the sequence number of the last event received."),
            *parameters,
        ),
        responses=(ApiResponse(101, meaning="The connection speaks WebSocket (version 13, subprotocol `realtime`)."),),
        errors=(*(*ANY_REQUEST, errors.ModelNotFound, errors.QueueFull, errors.Draining), *more_errors),
    )


def openapi_operation(path: str) -> Operation:
    """Return the operation that serves the document itself."""
    return Operation(
        "GET", path, "This document.", responses=(ApiResponse(200, {JSON: dict[str, object]}),), errors=ANY_REQUEST
    )


class TranscriptionForm(Struct):
    """The form of `POST /v1/audio/transcriptions`."""

    file: Annotated[str, Meta(extra_json_schema={"contentMediaType": "application/octet-stream"})]
    model: Annotated[str, Meta(max_length=64)]
    language: str = ""
    prompt: Annotated[str, Meta(max_length=1000)] = ""
    response_format: TranscriptFormat = "json"
    temperature: Annotated[float, Meta(ge=0, le=1)] = 0.0
    stream: bool = False
    granularities: list[Literal["segment", "word"]] = field(name="timestamp_granularities[]", default_factory=list)


class TranscriptBody(Struct):
    """A transcript: with `verbose_json` also its language, length and times; plain text for other formats."""

    text: str


def transcription_operation(
    caller: str, parameters: tuple[Parameter, ...], headers: Mapping[str, str], more_errors: Errors
) -> Operation:
    """Return the operation of transcriptions. `headers`: the headers of its answers."""
    return Operation(
        "POST",
        "/v1/audio/transcriptions",
        "The transcript of an audio clip.",
        caller,
        request={FORM: TranscriptionForm},
        parameters=parameters,
        responses=(ApiResponse(200, {JSON: TranscriptBody, TEXT: str, EVENTS: None}, headers=headers),),
        errors=(
            *(*ANY_REQUEST, *BODY, errors.ModelNotFound, errors.RateLimited, errors.Draining),
            *(errors.DeadlineExceeded, errors.EncoderFailed, *more_errors),
        ),
    )


class FileView(Struct, frozen=True):
    """OpenAI's file object. Times are unix seconds."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"


class FileList(Struct):
    """The body of `GET /v1/files`, the newest file first."""

    data: list[FileView]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class DeletedFile(Struct):
    id: str
    object: str = "file"
    deleted: bool = True


def list_page(files: list[FileView], limit: int, after: str = "", purpose: str = "") -> FileList:
    """Return a page of `files`, which come newest first. An unknown `after` begins at the newest."""
    found = [file for file in files if not purpose or file.purpose == purpose]
    ids = [file.id for file in found]
    rest = found[ids.index(after) + 1 if after in ids else 0 :]
    rows = rest[:limit]
    first, last = (rows[0].id, rows[-1].id) if rows else (None, None)
    return FileList(rows, len(rest) > limit, first, last)


def file_operations(
    caller: str,
    purposes: Any,
    page: tuple[Parameter, ...],
    common: Errors,
    upload_errors: Errors,
    content_errors: Errors,
    *,
    gives_content: bool,
) -> Iterator[Operation]:
    """Yield the operations. Args: caller: the client that may call them. purposes: The accepted purposes, as a Literal.
    page: The parameters of the list. common: The errors that each operation sends. upload_errors: The further
    errors of an upload. content_errors: The further errors of a request for the bytes of a file. gives_content:
    Whether the bytes of some files can be downloaded.
    """
    upload = defstruct(
        "FileUpload",
        [
            ("file", Annotated[str, Meta(extra_json_schema={"contentMediaType": "application/octet-stream"})]),
            ("purpose", purposes),
            ("anchor", str, field(name="expires_after[anchor]", default="created_at")),
            ("seconds", Annotated[int, Meta(ge=1)], field(name="expires_after[seconds]", default=86_400)),
        ],
    )
    ok, listed, deleted = ((ApiResponse(200, {JSON: kind}),) for kind in (FileView, FileList, DeletedFile))
    one = (*common, errors.NotFound)
    yield Operation(
        "POST",
        "/v1/files",
        "Upload a file, which requests can then name.",
        caller,
        request={FORM: upload},
        responses=ok,
        errors=(*common, *BODY, *upload_errors),
    )
    yield Operation(
        "GET",
        "/v1/files",
        "The caller's files, newest first.",
        caller,
        parameters=(*page, Parameter("purpose", "Only files of this purpose.")),
        responses=listed,
        errors=common,
    )
    yield Operation("GET", "/v1/files/{id}", "One file.", caller, responses=ok, errors=one)
    yield Operation("DELETE", "/v1/files/{id}", "Delete a file.", caller, responses=deleted, errors=one)
    yield Operation(
        "GET",
        "/v1/files/{id}/content",
        "The bytes of a batch's file. Files that requests name cannot be downloaded.",
        caller,
        responses=(ApiResponse(200, {"application/octet-stream": None}),) if gives_content else (),
        errors=(*one, *content_errors),
    )


SECRET_PATH = "/v1/webhooks/secret"


def secret_operations(caller: str, more_errors: Errors) -> Iterator[Operation]:
    """Yield the operations that read and rotate a caller's webhook secrets."""
    found = (ApiResponse(200, {JSON: WebhookSecrets}),)
    summary = "The secrets that sign the caller's webhooks."
    yield Operation("GET", SECRET_PATH, summary, caller, responses=found, errors=more_errors)
    summary, limited = (
        "Make a new secret. The old one still signs, too, for some time.",
        (*more_errors, errors.RateLimited),
    )
    yield Operation("POST", SECRET_PATH, summary, caller, responses=found, errors=limited)


def job_ended_operation() -> Operation:
    """Return the operation that is sent to the `webhook` of a job; `jobs.webhooks.format` chooses the body."""
    names = ("webhook-id", "webhook-timestamp", "webhook-signature")
    binary = ("ce-specversion", "ce-id", "ce-source", "ce-type", "ce-subject", "ce-time")
    signature = [
        Parameter(name, "Header of the Standard Webhooks specification.", "header", required=True) for name in names
    ]
    attributes = [
        Parameter(name, "Header of a CloudEvent in binary mode, whose body is `data`.", "header") for name in binary
    ]
    return Operation(
        "POST",
        "job.ended",
        "A job has ended.",
        request={JSON: AnyOf((StandardPayload, EndedJob)), CLOUD_EVENT_JSON: JobCloudEvent},
        parameters=(*signature, *attributes),
        responses=(ApiResponse(200, meaning="Any 2xx: delivered. 410: disabled. Any other status: repeated."),),
    )
