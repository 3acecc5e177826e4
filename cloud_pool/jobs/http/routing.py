"""Routes, replies and pages of the jobs API. Every handler acts for the authenticated principal alone."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager

import anyio
import msgspec
from aiohttp import hdrs, web

from router.errors import CausewayError, ClientGone
from router.numbers import read_page
from router.serving.responses import STALLED_S

from ...core.principal import Principal, Scope
from ...observability.tracing import JobTrace

OwnedHandler = Callable[[web.BaseRequest, Principal, str], Awaitable[web.StreamResponse]]
"""Gets the request, its principal and the id in its path."""
ROWS_A_READ = 10  # of a list: a read more


class Route(msgspec.Struct, frozen=True):
    """A path and its handlers by method. `pattern` may hold one group: the id that the handler gets.

    `scopes`: a token needs one of them.
    """

    pattern: re.Pattern[str]
    methods: Mapping[str, OwnedHandler]
    scopes: tuple[Scope, ...] = ("jobs",)

    @property
    def path(self) -> str:
        """The path with `{id}` in place of the group."""
        return re.sub(r"\(.*\)", "{id}", self.pattern.pattern)


def route(pattern: str, scopes: tuple[Scope, ...] = ("jobs",), /, **methods: OwnedHandler) -> Route:
    """Return a route, as `route("/v1/jobs", GET=..., POST=...)`. `scopes`: a token needs one of them."""
    return Route(re.compile(pattern), methods, scopes)


def reads_of_page(request: web.BaseRequest) -> int:
    """Return how many reads a list counts as: one, and one more for every ROWS_A_READ rows. Raises InvalidRequest."""
    limit, _ = read_page(request.query)
    return 1 + limit // ROWS_A_READ


async def begin_response(response: web.StreamResponse, request: web.BaseRequest) -> bool:
    """Send the head. Returns whether a body follows, which it does not for HEAD.

    Raises ClientGone: the client left before it.
    """
    try:
        await response.prepare(request)
    except ConnectionError as error:
        raise ClientGone("the client left before its response began") from error
    return request.method != hdrs.METH_HEAD


async def write_chunk(response: web.StreamResponse, data: bytes) -> None:
    """Write to the client. Raises ClientGone if the client left or stopped reading."""
    try:
        with anyio.fail_after(STALLED_S):
            await response.write(data)
    except (ConnectionError, TimeoutError) as error:
        raise ClientGone("the client does not read the stream any more") from error


@contextmanager
def enqueue_span(trace: JobTrace | None, job: str, queue: str, traceparent: str) -> Iterator[str]:
    """Trace the submission of a job or batch.

    Yields the traceparent for its later spans: that of this span, or without tracing the caller's `traceparent`.
    """
    if trace is None:
        yield traceparent
        return
    span = trace.send(job, queue, traceparent)
    try:
        yield span.traceparent
    except CausewayError as error:
        span.end(error.code)
        raise
    finally:
        span.end()
