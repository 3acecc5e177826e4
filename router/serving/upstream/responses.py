"""Whole responses and errors of an OpenAI server, bounded in bytes and in time; failures are translated to our errors.

1. no connection: refused, no route, DNS, TLS, connect timeout              CloudUnreachable
   closed without an answer                                                 CloudDisconnected
2. 429, 503: saturated; `Retry-After` is passed on                          CloudSaturated
   503 with a code that says no replica behind it can answer                CloudUnavailable
3. 400, 415: invalid request; the server's message and param                InvalidRequest
   a code that another target may not have, with 400, 413, 415 or 422       ContextLengthExceeded, …
   402, 404, 413, 422, 451: refused; the server's message and param         CloudRefused
4. 401, 403, 407: our credentials, without the server's message, as some    CloudRejected
   repeat parts of a key; other 4xx; 503 of a gateway that is outside the request's regions
5. 408, 504: timed out in the server                                        CloudTimeout
6. other 5xx, redirects, malformed HTTP                                     CloudFailed
7. an answer that stops before its end                                      StreamBroken
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Protocol

import msgspec

from ...errors import (
    BackendError,
    CausewayError,
    CloudBodyTooLarge,
    CloudDisconnected,
    CloudFailed,
    CloudLegallyUnavailable,
    CloudNotFound,
    CloudPaymentRequired,
    CloudRefused,
    CloudRejected,
    CloudSaturated,
    CloudTimeout,
    CloudUnavailable,
    CloudUnprocessable,
    CloudUnreachable,
    CloudUnreadable,
    ContextLengthExceeded,
    EngineUnavailable,
    IdentityUnavailable,
    InvalidGrammar,
    InvalidRequest,
    OutsideRegion,
    Phase,
    StreamBroken,
    UnsupportedFeature,
)
from ..http_client import ConnectError, DisconnectedError, HttpClientError, HttpResponse

MAX_ANSWER_BYTES = 16 * 1024 * 1024
MAX_ERROR_BYTES = 64 * 1024
_MAX_MESSAGE = 1000  # maximum number of characters that are kept of the server's message
_MAX_RETRY_S = 3600.0
_INVALID_REQUEST = (400, 415)
_REFUSED: dict[int, type[CloudRefused]] = {
    kind.status: kind
    for kind in (CloudPaymentRequired, CloudNotFound, CloudBodyTooLarge, CloudUnprocessable, CloudLegallyUnavailable)
}
_CREDENTIALS = (401, 403, 407)
_INVALID_REQUEST_KINDS: dict[str, type[InvalidRequest]] = {
    kind.code: kind for kind in (ContextLengthExceeded, InvalidGrammar, UnsupportedFeature)
}
# What vLLM, SGLang and llama-server say in words alone, each in its own.
_TOO_LONG = re.compile(r"maximum context length|maximum allowed length|exceeds? the available context size")
# Codes of our gateway's 503 responses that do not mean saturation.
_UNAVAILABLE: dict[str, str] = {
    CloudUnreachable.code: "none of its replicas can be reached",
    EngineUnavailable.code: "none of its replicas has the model",
    IdentityUnavailable.code: "it cannot authenticate the caller",
}


class TextRelay(Protocol):
    """Takes text of an answer as it arrives, without waking the task that iterates over the chunks."""

    def take(self, texts: Sequence[bytes], index: int, /) -> bool:
        """Pass on texts of choice `index`, each a token and a JSON string; never raise. False: not passed on."""
        ...


class UpstreamCall(msgspec.Struct, frozen=True):
    """The context of a request to a server, for reading its answer. `id` makes generated ids of tool calls unique."""

    id: str
    name: str  # of the target, for messages
    deadline: float  # the loop's clock, s
    sequences: int = 1
    relay: TextRelay | None = None  # relay for chunks that consist of text alone


async def read_whole(response: HttpResponse, call: UpstreamCall) -> bytes:
    """Return a complete body. Raises CloudTimeout, CloudUnreadable, CloudFailed or StreamBroken."""
    if (arrived := response.whole()) is not None and len(arrived) <= MAX_ANSWER_BYTES:
        return arrived
    response.bound(call.deadline)
    try:
        body = await read_body(response, MAX_ANSWER_BYTES)
    except TimeoutError as error:
        raise too_slow(call, "first_token") from error
    except HttpClientError as error:
        raise client_error(error, call.name, "stream") from error
    if body is None:
        raise too_large(call)
    return body


async def read_error(response: HttpResponse, call: UpstreamCall, until: float) -> CausewayError:
    """Return the error for a response whose status is not 200, with the server's message if it arrives in time."""
    body = await read_error_body(response, until)
    return status_error(response.status, response.header(b"retry-after"), body, call.name)


async def read_error_body(response: HttpResponse, until: float) -> bytes:
    """Return the body of an error if it is small and arrives in time, else b"". Releases the response."""
    response.bound(until)
    try:
        return await read_body(response, MAX_ERROR_BYTES) or b""
    except (TimeoutError, HttpClientError):
        return b""
    finally:
        response.release()


async def read_body(response: HttpResponse, limit_bytes: int) -> bytes | None:
    """Return the body; None if it is too large."""
    pieces: list[bytes] = []
    size_bytes = 0
    while piece := await response.read():
        size_bytes += len(piece)
        if size_bytes > limit_bytes:
            return None
        pieces.append(piece)
    return b"".join(pieces)


def too_slow(call: UpstreamCall, phase: Phase) -> CloudTimeout:
    return CloudTimeout(f"{call.name} took too long.", phase=phase)


def too_large(call: UpstreamCall) -> CloudUnreadable:
    return CloudUnreadable(f"{call.name}'s answer exceeds {MAX_ANSWER_BYTES} bytes.", phase="stream")


class _Error(msgspec.Struct):
    message: str = ""
    param: str | None = None
    code: str | int | None = None


class _Envelope(msgspec.Struct):
    error: _Error | str | None = None
    message: str = ""  # vLLM's older shape: the error object itself
    param: str | None = None
    code: str | int | None = None
    detail: object = None  # FastAPI's: a text, or a list of faults with `msg` and `loc`


def status_error(status: int, retry_after: str, body: bytes, name: str) -> CausewayError:
    """Return the error for a status other than 200, cases (2) to (6). `name` is the target's."""
    sent = server_error(body)
    reason = sent.message[:_MAX_MESSAGE] or f"{name} refused the request (HTTP {status})"
    if status in (*_INVALID_REQUEST, 413, 422):  # (3)
        specific = ContextLengthExceeded if _TOO_LONG.search(sent.message) else None
        if (kind := _INVALID_REQUEST_KINDS.get(str(sent.code), specific)) is not None:
            return kind(reason, param=sent.param)
    if status in _INVALID_REQUEST:
        return InvalidRequest(reason, param=sent.param)
    if refused := _REFUSED.get(status):
        return refused(reason, phase="first_token", param=sent.param)
    message = f"{name} answered HTTP {status}"
    if status in _CREDENTIALS:  # (4)
        return CloudRejected(f"{message}: it refuses this server's credentials.", phase="first_token")
    if status in (429, 503):  # (2)
        if str(sent.code) == OutsideRegion.code:  # (4) it is well, and would refuse such a request again
            return CloudRejected(f"{message}: it is outside the request's regions.", phase="first_token")
        wait_s = retry_after_s(retry_after)
        unavailable = _UNAVAILABLE.get(str(sent.code)) if status == 503 else None
        if unavailable is not None:
            return CloudUnavailable(f"{message}: {unavailable}.", phase="first_token", retry_after_s=wait_s)
        return CloudSaturated(message, phase="first_token", retry_after_s=wait_s)
    if status in (408, 504):  # (5)
        return CloudTimeout(message, phase="first_token")
    if 400 <= status < 500:  # (4)
        return CloudRejected(message, phase="first_token")
    return CloudFailed(message, phase="first_token")  # (6)


def client_error(error: HttpClientError, name: str, phase: Phase) -> BackendError:
    """Return the error for an exception of the HTTP client, cases (1), (6) and (7)."""
    kind = type(error).__name__
    if isinstance(error, ConnectError):  # (1)
        kind = type(error.cause or error).__name__
        return CloudUnreachable(f"{name} cannot be reached ({kind}).", phase="connect")
    if phase == "stream":  # (7)
        return StreamBroken(f"{name}'s answer broke off ({kind}).", phase="stream")
    if isinstance(error, DisconnectedError):  # (1)
        return CloudDisconnected(f"{name} closed the connection without an answer ({kind}).", phase="send")
    return CloudFailed(f"{name} sent malformed HTTP ({kind}).", phase=phase)  # (6)


def retry_after_s(text: str) -> float | None:
    """Return the seconds of a `Retry-After` header (RFC 9110, 10.2.3: seconds, or a date); None for anything else."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if math.isnan(seconds):
        from email.utils import parsedate_to_datetime  # on demand: most headers have seconds

        try:
            when = parsedate_to_datetime(text)
        except ValueError:
            return None
        aware = when if when.tzinfo is not None else when.replace(tzinfo=UTC)
        seconds = (aware - datetime.now(UTC)).total_seconds()
    return min(_MAX_RETRY_S, max(0.0, seconds))


def server_error(body: bytes) -> _Error:
    """Return the server's error object, or its readable fields."""
    try:
        envelope = msgspec.json.decode(body, type=_Envelope)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Error()
    if isinstance(envelope.error, _Error):
        return envelope.error
    return _Error(envelope.error or envelope.message or _detail(envelope.detail), envelope.param, envelope.code)


def _detail(value: object) -> str:
    """Return FastAPI's detail in one line: each fault's location and message, never the value that was sent."""
    if isinstance(value, str):
        return value
    faults = [fault for fault in value if isinstance(fault, dict)] if isinstance(value, list) else []
    return "; ".join(f"{'.'.join(map(str, fault.get('loc') or ()))}: {fault.get('msg', '')}" for fault in faults)
