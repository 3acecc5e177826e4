"""Everything that this package uses of aiohttp's private parts; tests/edge/test_aiohttp_internals.py names each."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from router.serving.request import plain_path


def is_between_requests(connection: RequestHandler) -> bool:
    """Whether the connection waits for the head of a request, the first one or the next.

    `RequestHandler._waiter`: the only place that tells an idle connection from one whose request has just arrived or
    whose response is still being written; closing either of these would lose an answer.
    """
    waiter = connection._waiter  # noqa: SLF001
    return waiter is not None and not waiter.done()


def make_request(message: Any, payload: Any, protocol: Any, writer: Any, task: asyncio.Task[None]) -> web.BaseRequest:
    """Build a request with a plain path: what `web.Server` takes as `request_factory`.

    The message is a named tuple, whose `url` is where `BaseRequest.path` comes from; `raw_path` stays as it was sent.
    """
    url = message.url
    if (path := plain_path(url.raw_path)) != url.raw_path:
        message = message._replace(url=url.with_path(path, encoded=True, keep_query=True))
    return web.BaseRequest(message, payload, protocol, writer, task, asyncio.get_running_loop())
