"""A job's events as server-sent events: from the start or after Last-Event-ID, then live until the job ends."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator

import msgspec

from router.errors import InvalidRequest
from router.jobs.states import FINAL_STATES

from ..store.redis_client import RedisClient, Reply, as_fields, as_list, as_text

_ID = re.compile(r"([0-9]{1,18})-([0-9]{1,18})")
_BLOCK_MS = 2000
_SILENT_BLOCKS = 7  # without an event; then a comment keeps proxies from closing the connection
START = "0-0"
COMMENT = b": still there\n\n"
_FINAL_EVENTS = frozenset(state.value for state in FINAL_STATES)


class _EventData(msgspec.Struct, omit_defaults=True):
    event: str
    progress: msgspec.Raw | None = None
    error: msgspec.Raw | None = None


def read_last_id(header: str) -> str:
    """Return the event id after which a client continues. Raises InvalidRequest."""
    if not header:
        return START
    if not _ID.fullmatch(header):
        raise InvalidRequest("`Last-Event-ID` is an id of this stream, or absent")
    return header


async def stream_events(database: RedisClient, job: str, last_id: str) -> AsyncGenerator[bytes, None]:
    """Yield SSE bytes until the event that ends the job, or until its events have expired.

    Raises JobStoreUnavailable.
    """
    key = database.key("events", job)
    silent = 0
    while not await _is_over(database, key, last_id):
        reply = as_list(await database.command("XREAD", "COUNT", 100, "BLOCK", _BLOCK_MS, "STREAMS", key, last_id))
        for entry in as_list(as_list(reply[0])[1]) if reply else []:
            last_id = as_text(as_list(entry)[0])
            yield _encode(entry)
        silent = 0 if reply else silent + 1
        if silent >= _SILENT_BLOCKS:
            silent = 0
            yield COMMENT


async def _is_over(database: RedisClient, key: str, last_id: str) -> bool:
    """Whether no event will come after `last_id`."""
    newest = as_list(await database.command("XREVRANGE", key, "+", "-", "COUNT", 1))
    if not newest:
        return True
    entry_id, fields = as_list(newest[0])
    return _order(as_text(entry_id)) <= _order(last_id) and as_fields(fields)["event"].decode() in _FINAL_EVENTS


def _order(entry_id: str) -> tuple[int, int]:
    time, _, sequence = entry_id.partition("-")
    return int(time), int(sequence)


def _encode(entry: Reply) -> bytes:
    entry_id, fields = as_list(entry)
    values = as_fields(fields)
    event, data = values["event"].decode(), values["data"]
    raw = msgspec.Raw(data) if data else None
    body = _EventData(event, progress=raw) if event == "progress" else _EventData(event, error=raw)
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (as_text(entry_id).encode(), event.encode(), msgspec.json.encode(body))
