"""The listener's use of aiohttp's server, also beyond its interface: tests/router/serving/test_aiohttp_internals.py."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, cast

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from ..errors import CausewayError, InvalidRequest
from . import responses
from .logs import redacted
from .request import MAX_HEADERS, NO_HEADERS, has_response_begun, plain_path
from .responses import SERVER, ServerResponse, WholeResponse, error_response

log = logging.getLogger(__name__)

# for the rest of a refused request's body: a reset would lose the refusal, but the place is taken meanwhile
_LINGER_S = 5.0
_READ_BYTES = 64 * 1024  # of an unread body, twice as much and one read of the socket (256 kB) are in memory


class Plain(Protocol):
    """The plain connection that aiohttp has taken over."""

    def release(self) -> None:
        """Release the place of a lost connection."""
        ...


class AiohttpConnection(RequestHandler):
    """A connection whose requests aiohttp reads. `plain`: the plain one before it, which keeps its place."""

    def __init__(self, server: web.Server, plain: Plain, read_timeout_s: float) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # off: `self.access_log` is Optional
            auto_decompress=False,
            keepalive_timeout=read_timeout_s,
            lingering_time=min(_LINGER_S, read_timeout_s),
            read_bufsize=_READ_BYTES,
            max_headers=MAX_HEADERS,
        )
        self.plain = plain

    def take_over(self, transport: asyncio.Transport, received: bytes, close_at: float) -> None:
        """Begin with the received bytes of unanswered requests. At `close_at`, the loop's time, the connection is
        closed unless its next head has arrived.
        """
        transport.set_protocol(self)
        self.connection_made(transport)
        self._close_at(close_at)
        self.data_received(received)

    def _close_at(self, close_at: float) -> None:
        """Set `RequestHandler._keepalive_handle`: its own timer would grant a slow head twice the time."""
        if self._keepalive_handle is not None:
            self._keepalive_handle.cancel()
        self._next_keepalive_close_time = close_at
        self._keepalive_handle = self._loop.call_at(close_at, self._process_keepalive)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.plain.release()
        super().connection_lost(exc)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Shape aiohttp's own errors like OpenAI's; of its message, which quotes the bytes, use the first line."""
        if has_response_begun(request):
            raise ConnectionError("The response has begun, so the connection can only be closed.")
        if status >= 500:
            log.error("A request failed in the HTTP server: %s.", "" if exc is None else redacted(exc))
            error = CausewayError("The server failed.")
        else:
            reason = (message or "").strip().partition("\n")[0][:200]
            error = InvalidRequest(f"This is not valid HTTP: {reason}")
        response = whole_response(error_response(error))
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """End what is sent with the last response, while the rest of its request is still read and dropped."""
        finished = await super().finish_response(request, resp, start_time)
        transport = self.transport
        if not resp.keep_alive and transport is not None and transport.can_write_eof() and not transport.is_closing():
            transport.write_eof()
        return finished

    @property
    def is_idle(self) -> bool:
        """Whether the connection waits for the head of a request."""
        return is_between_requests(self)


def is_between_requests(connection: RequestHandler) -> bool:
    """Return whether the connection waits for the head of its first or next request. Only `RequestHandler._waiter`
    distinguishes an idle connection from one whose request has just arrived or whose response is still being written;
    closing either of the latter would lose an answer.
    """
    waiter = connection._waiter  # noqa: SLF001
    return waiter is not None and not waiter.done()


class HttpRequest(web.BaseRequest):
    """A request whose response has CORS headers and a `Server` header without software versions.
    `BaseRequest._prepare_hook` is the only place that sees the head of every response, WebSockets and aiohttp's own
    errors included; aiohttp's web application overrides it for its signal `on_response_prepare`.
    """

    cors: Mapping[str, str] = NO_HEADERS
    """The CORS headers of the answer."""

    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        response.headers["Server"] = SERVER
        response.headers.update(self.cors)


def make_request(message: Any, payload: Any, protocol: Any, writer: Any, task: asyncio.Task[None]) -> HttpRequest:
    """Build a request with a plain path. This is the `request_factory` of `web.Server`."""
    target = message.path
    if "//" in target or "?" in target or target[-1:] == "/":  # few requests need this
        message = with_plain_path(message)
    return HttpRequest(message, payload, protocol, writer, task, asyncio.get_running_loop())


def with_plain_path(message: Any) -> Any:
    """Return a message with a plain path in `url`, which `BaseRequest.path` takes; `raw_path` is unchanged."""
    url = message.url
    if (path := plain_path(url.raw_path)) == url.raw_path:
        return message
    return message._replace(url=url.with_path(path, encoded=True, keep_query=True))


def aiohttp_response(response: ServerResponse) -> web.StreamResponse:
    """Return aiohttp's form of a response. Of one that is written without it, it calls `prepare` and `write_eof`."""
    return whole_response(response) if isinstance(response, WholeResponse) else cast("web.StreamResponse", response)


def whole_response(response: WholeResponse) -> web.Response:
    """Return aiohttp's form of a whole response."""
    made = web.Response(status=response.status, body=response.body, headers=response.headers)
    if not response.keep_alive:
        made.force_close()
    return made


def json_response(value: object, status: int = 200, headers: Mapping[str, str] = {}) -> web.Response:
    """Return a value as JSON."""
    return whole_response(responses.json_response(value, status, headers))


def new_server(handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> web.Server:
    """Return the server of connections, which cancels the handlers of clients that leave."""
    return web.Server(handle, request_factory=make_request, handler_cancellation=True)
