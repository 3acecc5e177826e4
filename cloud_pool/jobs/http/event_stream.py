"""A job's events as server-sent events: from the start or from behind Last-Event-ID, then live until the job's end."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator

import msgspec

from router.errors import InvalidRequest

from ..states import FINAL_STATES
from ..store.redis_client import RedisClient, Reply, items, pairs, text

_ID = re.compile(r"([0-9]{1,18})-([0-9]{1,18})")
_BLOCK_MS = 2000
_QUIET = 7  # blocks without an event, then a comment, so that proxies keep the connection
START = "0-0"
COMMENT = b": still there\n\n"
_ENDS = frozenset(state.value for state in FINAL_STATES)


class _EventData(msgspec.Struct, omit_defaults=True):
    event: str
    progress: msgspec.Raw | None = None
    error: msgspec.Raw | None = None


def read_last_id(header: str) -> str:
    """Raises InvalidRequest."""
    if not header:
        return START
    if not _ID.fullmatch(header):
        raise InvalidRequest("`Last-Event-ID` is an id of this stream, or absent")
    return header


async def stream_events(database: RedisClient, job: str, last: str) -> AsyncGenerator[bytes, None]:
    """SSE bytes. Ends behind the event of the job's end, or when the stream is gone. Raises StoreUnavailable."""
    key = database.key("events", job)
    quiet = 0
    while not await _is_over(database, key, last):
        reply = items(await database.command("XREAD", "COUNT", 100, "BLOCK", _BLOCK_MS, "STREAMS", key, last))
        for entry in items(items(reply[0])[1]) if reply else []:
            last = text(items(entry)[0])
            yield _event(entry)
        quiet = 0 if reply else quiet + 1
        if quiet >= _QUIET:
            quiet = 0
            yield COMMENT


async def _is_over(database: RedisClient, key: str, last: str) -> bool:
    """Nothing comes behind `last`: the job has ended with it, or its events are forgotten."""
    newest = items(await database.command("XREVRANGE", key, "+", "-", "COUNT", 1))
    if not newest:
        return True
    at, fields = items(newest[0])
    return _number(text(at)) <= _number(last) and pairs(fields)["event"].decode() in _ENDS


def _number(entry: str) -> tuple[int, int]:
    time, _, order = entry.partition("-")
    return int(time), int(order)


def _event(entry: Reply) -> bytes:
    at, fields = items(entry)
    told = pairs(fields)
    what, data = told["event"].decode(), told["data"]
    raw = msgspec.Raw(data) if data else None
    said = _EventData(what, progress=raw) if what == "progress" else _EventData(what, error=raw)
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (text(at).encode(), what.encode(), msgspec.json.encode(said))
