"""Every use of aiohttp beyond its documented interface, in one place, each with its reason.

`tests/cloud/test_aiohttp_internals.py` has a test for each, which names what a new aiohttp broke.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from aiohttp import hdrs, web

from router.serving.request import plain_path

SERVER = "causeway"


def is_between_requests(connection: web.RequestHandler) -> bool:
    """Return whether the connection waits for the head of a request, the first one or the next.

    `RequestHandler._waiter`: the only place that tells an idle connection from one whose request has just arrived or
    whose response is still being written; closing either of these would lose an answer.
    """
    waiter = connection._waiter  # noqa: SLF001
    return waiter is not None and not waiter.done()


class BufferedHeadResponse(web.StreamResponse):
    """A stream whose head leaves with its first event, in one write: the client wakes up once for its first token.

    `StreamResponse._send_headers_immediately`: aiohttp's own switch, which its `web.Response` turns off the same way.
    """

    _send_headers_immediately = False


class Request(web.BaseRequest):
    """A request whose response names no versions of software in its header `Server`.

    `BaseRequest._prepare_hook`: the one place that sees the head of every response, also of a WebSocket and of
    aiohttp's own errors; aiohttp's web application overrides it for its signal `on_response_prepare`.
    """

    cors: Mapping[str, str] = {}
    """Headers of the response, so that a page of an allowed origin may read it."""

    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        response.headers[hdrs.SERVER] = SERVER
        response.headers.update(self.cors)


def make_request(message: Any, payload: Any, protocol: Any, writer: Any, task: asyncio.Task[None]) -> Request:
    """Build a request with a plain path: what `web.Server` takes as `request_factory`.

    The message is a named tuple, whose `url` is where `BaseRequest.path` comes from; `raw_path` stays as it was sent.
    """
    url = message.url
    if (path := plain_path(url.raw_path)) != url.raw_path:
        message = message._replace(url=url.with_path(path, encoded=True, keep_query=True))
    return Request(message, payload, protocol, writer, task, asyncio.get_running_loop())


def has_response_begun(request: web.BaseRequest) -> bool:
    """Return whether bytes of the response were written. `output_size`: undocumented attribute of the stream writer,
    which aiohttp's own `handle_error` reads for the same purpose."""
    return bool(request.writer.output_size)
