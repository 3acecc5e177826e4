"""What the gateway's streams use of aiohttp beyond its documented interface."""

from __future__ import annotations

from aiohttp import web


class BufferedHeadResponse(web.StreamResponse):
    """A stream whose head leaves with its first event, in one write: the client wakes up once for its first token.

    `StreamResponse._send_headers_immediately`: aiohttp's own switch, which its `web.Response` turns off the same way.
    """

    _send_headers_immediately = False
