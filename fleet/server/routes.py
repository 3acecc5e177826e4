"""What a route of the control plane is, and how its errors look. The OpenAPI document is made from the same values."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Literal, TypeVar

import msgspec
from aiohttp import web
from sqlalchemy.exc import SQLAlchemyError

from router.bundle.protocol import MAX_MESSAGE_BYTES
from router.errors import BodyTooLarge, CausewayError, InvalidJSON, InvalidRequest, MethodNotAllowed, NotFound
from router.openai import encode_error, error_headers

Handler = Callable[[web.Request], Coroutine[Any, Any, web.StreamResponse]]
Caller = Literal["anyone", "device", "viewer", "operator", "approver"]
Body = TypeVar("Body")
JSON = "application/json"
_log = logging.getLogger("causeway.fleet.server")


class ApiRoute(msgspec.Struct, frozen=True):
    """One route.

    Attributes:
        path: As aiohttp reads it, such as ``/v1/devices/{id}``.
        summary: For the OpenAPI document.
        caller: Who may call it; documented here, checked by the handler.
        request: The struct of the JSON body; None: none.
        response: The struct of the JSON answer; None: none, or no JSON.
        status: Of success.
        errors: The error classes that the handler raises, with those they stand for.
        query: Names of query parameters, with their meaning.
        headers: Names of request headers, with their meaning.
        content_type: Of an answer that is not JSON.
        parks: The handler waits for others and holds no transaction itself: it is cancelled when the client leaves.
            Every other handler is finished.
    """

    method: Literal["GET", "POST", "PUT", "DELETE"]
    path: str
    handler: Handler
    summary: str
    caller: Caller = "anyone"
    request: Any = None
    response: Any = None
    status: int = 200
    errors: tuple[type[CausewayError], ...] = ()
    query: dict[str, str] = {}
    headers: dict[str, str] = {}
    content_type: str = JSON
    parks: bool = False


async def read_body(request: web.Request, most_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    """Return the whole body.

    Raises:
        BodyTooLarge: More than `most_bytes`; the rest is not read.
    """
    if (request.content_length or 0) > most_bytes:
        raise BodyTooLarge(f"the body has {request.content_length} bytes; at most {most_bytes} are read")
    chunks, size = [], 0
    async for chunk in request.content.iter_any():
        size += len(chunk)
        if size > most_bytes:
            raise BodyTooLarge(f"the body has more than {most_bytes} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def decode_body(body: bytes, kind: type[Body]) -> Body:
    """Parse a JSON body.

    Raises:
        InvalidJSON: Not JSON.
        InvalidRequest: A field is missing or has a wrong value; the message names it.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidJSON(f"the body is not valid JSON: {error}") from error


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type=JSON, headers=headers)


def error_response(error: CausewayError) -> web.Response:
    return web.Response(body=encode_error(error), status=error.status, content_type=JSON, headers=error_headers(error))


class Unfinished:
    """Handlers whose clients have left, and which go on: a transaction is not broken off in the middle."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[web.StreamResponse]] = set()

    def finished(self, handler: Handler) -> Handler:
        """Return the handler in a task of its own, which outlives the request."""

        async def run(request: web.Request) -> web.StreamResponse:
            task = asyncio.ensure_future(handler(request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return await asyncio.shield(task)

        return run

    async def wait(self, timeout_s: float) -> None:
        """Return when all have ended, or after `timeout_s`."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)


@web.middleware
async def errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer every error with its JSON object. What is no CausewayError is logged and hidden."""
    try:
        return await handler(request)
    except CausewayError as error:
        response = error_response(error)
    except web.HTTPMethodNotAllowed as error:
        allow = ", ".join(sorted(error.allowed_methods))
        response = error_response(MethodNotAllowed(f"{request.path} takes {allow}", allow=allow))
    except web.HTTPNotFound:
        response = error_response(NotFound(f"there is nothing at {request.path[:200]}"))
    except web.HTTPException:
        raise
    except (Exception, SQLAlchemyError):
        _log.exception("%s %s failed", request.method, request.path)
        response = error_response(CausewayError("the control plane failed; its log says why"))
    if not request.content.is_eof():  # a body that was refused is not read
        response.force_close()
    return response
