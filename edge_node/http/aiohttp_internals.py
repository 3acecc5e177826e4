"""Everything that this package uses of aiohttp's private attributes; tests/edge/test_aiohttp_internals.py names each.

`StreamResponse._send_headers_immediately`: aiohttp 3.12 and newer write a stream's head as soon as it is prepared.
Deferring it until the first chunk saves the client one wake-up, and the server one system call, per streamed answer.
"""

from __future__ import annotations

from aiohttp import web


class DeferredHeadStream(web.StreamResponse):
    """Sends its head together with the first chunk, like aiohttp's own `web.Response`."""

    _send_headers_immediately = False
