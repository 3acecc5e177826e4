"""Everything that this package uses of aiohttp's private attributes; tests/edge/test_aiohttp_internals.py names each.

`StreamResponse._send_headers_immediately`: aiohttp 3.12 and newer write a stream's head as soon as it is prepared.
Deferring it until the first chunk saves the client one wake-up, and the server one system call, per streamed answer.

`RequestHandler._waiter`: the only place that tells an idle connection from one whose request has just arrived or whose
response is still being written; closing either of these would lose an answer.
"""

from __future__ import annotations

from aiohttp import web
from aiohttp.web_protocol import RequestHandler


class DeferredHeadStream(web.StreamResponse):
    """Sends its head together with the first chunk, like aiohttp's own `web.Response`."""

    _send_headers_immediately = False


def is_between_requests(connection: RequestHandler) -> bool:
    """Whether the connection waits for the head of a request, the first one or the next."""
    waiter = connection._waiter  # noqa: SLF001
    return waiter is not None and not waiter.done()
