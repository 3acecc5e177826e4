"""Bad days of a server with OpenAI's HTTP API, and what a client gets on each from the edge and from the gateway."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import msgspec

from .dialects import HI, USAGE
from .edge_node.raw_upstream import delta, document, events, reply

RETRY_AFTER_S = 30


class BadDay(msgspec.Struct, frozen=True):
    """What the server sends, and what a client of a stream gets.

    `stalls`: it sends nothing more, and keeps the connection open. `status`, `code`: of an error before the first byte;
    `text`, and `late`, the code of an error after it, otherwise.
    """

    sent: bytes
    stalls: bool = False
    status: int = 200
    code: str = ""
    text: str = "hi"
    late: str = ""


def _later() -> str:
    return format_datetime(datetime.now(UTC) + timedelta(seconds=RETRY_AFTER_S), usegmt=True)


def _saturated(retry_after: str) -> bytes:
    headers = (f"Retry-After: {retry_after}",)
    return document({"error": {"message": "full"}}, status="429 Too Many Requests", headers=headers)


def bad_days() -> dict[str, BadDay]:
    """Return the days by name; dates in them are of now."""
    failed = {"error": {"message": "out of memory"}}
    return {
        "html with status 200": BadDay(
            reply(b"<html>Sign in</html>", media_type="text/html"), status=502, code="cloud_unreadable"
        ),
        "html as a stream": BadDay(
            reply(b"<html>Sign in</html>", media_type="text/event-stream"), status=502, code="cloud_unreadable"
        ),
        "an error as the first event": BadDay(events(failed), status=502, code="cloud_failed"),
        "an error inside a stream": BadDay(events(HI[0], failed), text="h", late="cloud_failed"),
        "no done": BadDay(events(*HI, end=b"")),
        "no usage": BadDay(events(*HI)),
        "usage before the end": BadDay(events(HI[0], {"choices": [], "usage": USAGE}, *HI[1:])),
        "no finish reason": BadDay(events(*HI[:2])),
        "neither finish reason nor done": BadDay(events(*HI[:2], end=b""), late="stream_broken"),
        "ids and model change": BadDay(
            events(*({**event, "id": f"x{n}", "model": f"m{n}"} for n, event in enumerate(HI)))
        ),
        "a redirect": BadDay(
            reply(b"", status="307 Temporary Redirect", headers=("Location: http://127.0.0.1:1/v1",)),
            status=502,
            code="cloud_failed",
        ),
        "429 with seconds": BadDay(_saturated(str(RETRY_AFTER_S)), status=429, code="cloud_saturated"),
        "429 with a date": BadDay(_saturated(_later()), status=429, code="cloud_saturated"),
        "closed in the stream": BadDay(events(HI[0], end=b""), text="h", late="stream_broken"),
        "a stall before tokens": BadDay(
            events(delta("", role="assistant"), end=b""), stalls=True, status=504, code="timeout"
        ),
        "a stall between tokens": BadDay(events(HI[0], end=b""), stalls=True, text="h", late="timeout"),
        "a stall after tokens": BadDay(events(*HI, end=b""), stalls=True),
    }
