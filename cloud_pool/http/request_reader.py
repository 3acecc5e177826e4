"""What a client sends: headers, parsed once, and the body, bounded in bytes and in time.

A malformed header of ours is a 400; a malformed `traceparent` is ignored, as its specification asks.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from aiohttp import hdrs, web

from router.openai import check_header_names, check_media_type
from router.openai.audio.form import check_form
from router.serving.request import (
    DEADLINE,
    PRIORITY,
    TAGS,
    arrived_body,
    combined,
    members,
    read_choice,
    read_deadline_ms,
    read_request_id,
    read_tags,
    read_traceparent,
    receive_body,
)
from router.types import folded_tags

from ..admission import RANK, Priority
from ..cache.shared_cache import NO_STORE
from ..core.request_context import FREE_BYTES, BodyMemory

_HEADERS = frozenset(
    f"x-causeway-{name}"
    for name in ("deadline-ms", "priority", "critical", "tags", "policy")  # policy: for the ledger
)
_CACHE_BYPASS = {"no-store", "no-cache", "private", "max-age=0"}


class RequestHeaders(msgspec.Struct, frozen=True):
    id: str
    deadline_ms: int | None
    priority: Priority
    traceparent: str
    critical: bool  # only the requested tier's full answer will do
    tags: tuple[str, ...] = ()  # as `folded_tags`


def read_headers(lines: Iterable[tuple[str, str]], request_id: str = "") -> RequestHeaders:
    """Parse our headers and the trace context.

    Args:
        lines: the headers; a name may come more than once.
        request_id: the request's id, if it was read already.

    Raises:
        InvalidRequest: a header of ours is malformed, misspelt, or has two values.
    """
    headers = combined(lines)
    check_header_names(headers, _HEADERS)
    return RequestHeaders(
        id=request_id or read_request_id(headers),
        deadline_ms=read_deadline_ms(headers.get(DEADLINE)),
        priority=read_choice(headers, PRIORITY, RANK) or "standard",
        traceparent=read_traceparent(headers),
        critical=read_choice(headers, "x-causeway-critical", ("true", "false")) == "true",
        tags=folded_tags((*read_tags(headers.get(TAGS, "")), *_cache_tags(headers.get("cache-control", "")))),
    )


async def read_body(
    http: web.BaseRequest, max_bytes: int, timeout_s: float, memory: BodyMemory, caller: str, *, form: bool = False
) -> bytes:
    """Read the whole body, which its headers must say is plain JSON, or a multipart form.

    Args:
        memory: counts a large body, before it is read if its size is known; the caller releases it.
        form: it is a form.

    Raises:
        UnsupportedMediaType: its headers say that it is something else, or compressed.
        BodyTooLarge: it has more than `max_bytes`.
        RequestTimeout: it did not arrive within `timeout_s`.
        InvalidRequest: its transfer encoding is malformed.
        RateLimited: the caller has its share of the memory.
        Shed: all tenants have.
    """
    check = check_form if form else check_media_type
    check(http.headers.get(hdrs.CONTENT_TYPE), http.headers.get(hdrs.CONTENT_ENCODING))

    def hold(size: int) -> None:
        if size > FREE_BYTES or http.content_length is None:  # of an unknown size, it counts from the beginning
            memory.hold(http, caller, max(size, FREE_BYTES))

    body = arrived_body(http, max_bytes)
    if body is None:
        return await receive_body(http, max_bytes, timeout_s, hold)
    hold(len(body))
    return body


def _cache_tags(cache_control: str) -> list[str]:
    """A request that refuses a cached answer, or to be cached, bypasses the cache in both directions."""
    directives = {word.lower() for word in members([cache_control])}
    return [NO_STORE] if directives & _CACHE_BYPASS else []
