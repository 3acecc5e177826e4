"""A request of aiohttp whose response names no versions of software in its header `Server`."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import hdrs, web

from router.bundle.protocol import MAX_MESSAGE_BYTES
from router.serving.request import plain_path

from .connections import HttpConnection

SERVER = "causeway"


class NamedRequest(web.Request):
    """A request of the control plane.

    `Request._prepare_hook`: the one place that sees the head of every response, also of aiohttp's own errors, for which
    it sends no signal `on_response_prepare`.
    """

    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        await super()._prepare_hook(response)
        response.headers[hdrs.SERVER] = SERVER


def make_request(message: Any, payload: Any, protocol: Any, writer: Any, task: asyncio.Task[None]) -> web.Request:
    """Build a request with a plain path: what `web.Server` takes as `request_factory`.

    Bodies have at most MAX_MESSAGE_BYTES. The message is a named tuple, whose `url` is where `Request.path` comes from;
    `raw_path` stays as it was sent.
    """
    url = message.url
    if (path := plain_path(url.raw_path)) != url.raw_path:
        message = message._replace(url=url.with_path(path, encoded=True, keep_query=True))
    if isinstance(protocol, HttpConnection):
        protocol.arriving = payload
    loop = asyncio.get_running_loop()
    return NamedRequest(message, payload, protocol, writer, task, loop, client_max_size=MAX_MESSAGE_BYTES)
