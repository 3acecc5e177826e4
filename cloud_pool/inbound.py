"""What a caller's headers say, parsed once. A malformed header of ours is a 400; a malformed trace is dropped (W3C)."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping

import msgspec

from router.errors import InvalidRequest

from .admission import RANK, Priority

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Inbound(msgspec.Struct, frozen=True):
    id: str
    deadline_ms: int | None
    priority: Priority
    traceparent: str


def read_headers(headers: Mapping[str, str]) -> Inbound:
    """Raises InvalidRequest."""
    said = headers.get("x-request-id", "")
    trace = headers.get("traceparent", "")
    return Inbound(
        id=said if _REQUEST_ID.fullmatch(said) else secrets.token_hex(8),
        deadline_ms=_deadline_ms(headers.get("x-causeway-deadline-ms")),
        priority=_priority(headers.get("x-causeway-priority", "standard")),
        traceparent=trace if _TRACEPARENT.fullmatch(trace) else "",
    )


def _deadline_ms(text: str | None) -> int | None:
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise InvalidRequest("`x-causeway-deadline-ms` is the time left as a whole number of milliseconds")
    return int(text)


def _priority(text: str) -> Priority:
    for name in RANK:
        if text == name:
            return name
    raise InvalidRequest(f"`x-causeway-priority` is one of {', '.join(RANK)}")
