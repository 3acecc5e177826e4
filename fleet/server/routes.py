"""The control plane's routes as values, the bodies of requests, and errors as JSON."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any, Literal, TypeVar

import msgspec
from aiohttp import hdrs, web

from causeway_server.router import errors
from causeway_server.router.bundle.protocol import MAX_MESSAGE_BYTES
from causeway_server.router.openai.request_body import check_media_type
from causeway_server.router.serving.aiohttp_connection import whole_response
from causeway_server.router.serving.responses import error_response
from causeway_server.router.web_origins import WebOrigins

Handler = Callable[[web.Request], Coroutine[Any, Any, web.StreamResponse]]
Body = TypeVar("Body")
# Any `Host` is allowed: behind a proxy it can be any name, and everything except the signed files needs a token or a
# session's cookie, which a page under a foreign name does not have.
_ORIGINS = WebOrigins()
log = logging.getLogger(__name__)


class ApiRoute(msgspec.Struct, frozen=True):
    """A route; `fleet/openapi.yaml` says what it takes, answers and refuses."""

    method: Literal["GET", "POST", "DELETE"]
    path: str  # the path pattern of aiohttp, such as ``/v1/devices/{id}``
    handler: Handler  # checks the caller, too


class ClientLeft(ConnectionError):
    """The connection was closed inside a request's body, so no answer can be sent."""


async def read_body(request: web.Request) -> bytes:
    """Return the whole body, which is empty or JSON, of at most MAX_MESSAGE_BYTES (`build_app`).

    Raises BodyTooLarge, ClientLeft if the connection closed before its end, or UnsupportedMediaType.
    """
    try:
        body = await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise errors.BodyTooLarge(f"The body has more than {MAX_MESSAGE_BYTES} bytes.") from error
    except ConnectionError as error:
        raise ClientLeft from error
    if body:
        check_media_type(request.headers.get(hdrs.CONTENT_TYPE), request.headers.get(hdrs.CONTENT_ENCODING))
    return body


def decode_body(body: bytes, kind: type[Body]) -> Body:
    """Parse a JSON body. Raises InvalidJSON, or InvalidRequest, which names the field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise errors.InvalidRequest(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise errors.InvalidJSON(f"The body is not valid JSON, or nested too deeply: {error}.") from error


def errors_as_json(handler: Handler) -> Handler:
    """Wrap a handler (a middleware takes longer): refuse other origins' pages, answer errors as JSON."""

    async def run(request: web.Request) -> web.StreamResponse:
        try:
            _ORIGINS.admit(request.method, request.headers)
            return await handler(request)
        except errors.CausewayError as error:
            response = whole_response(error_response(error))
        except (web.HTTPException, ClientLeft):
            raise
        except Exception:
            log.exception("%s %s failed.", request.method, request.path)
            response = whole_response(
                error_response(errors.CausewayError("The control plane failed. Its log has the reason."))
            )
        if not request.content.is_eof():  # the rest of a refused body is not read
            response.force_close()
        return response

    return run


@errors_as_json
async def nothing_here(request: web.Request) -> web.StreamResponse:
    """Raise the error for an unknown path or method."""
    resources = [one for one in request.app.router.resources() if one.canonical == request.path]
    methods = {route.method for resource in resources for route in resource}
    if methods:
        allow = ", ".join(sorted(methods))
        raise errors.MethodNotAllowed(f"{request.path} allows {allow}.", allow=allow)
    raise errors.NotFound(f"Path {request.path[:200]} not found.")
