"""Everything that this package uses of aiohttp's private attributes; tests/edge/test_aiohttp_internals.py names each.

`RequestHandler._waiter`: the only place that tells an idle connection from one whose request has just arrived or whose
response is still being written; closing either of these would lose an answer.
"""

from __future__ import annotations

from aiohttp.web_protocol import RequestHandler


def is_between_requests(connection: RequestHandler) -> bool:
    """Whether the connection waits for the head of a request, the first one or the next."""
    waiter = connection._waiter  # noqa: SLF001
    return waiter is not None and not waiter.done()
