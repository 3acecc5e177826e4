"""A job's events as server-sent events: its states, and the text of its answer while a worker makes it.

They begin at the start or after Last-Event-ID, and end with the job.
An event's id is the id of the last state in Redis and, once the job has run, the run's fence and the number of
characters of its text that the client has: `1800000000000-0.2-17`. The text of a failed run is void: the next run's
`running` event tells the client to start again. Text that the client lacks when the job succeeds comes from the result,
so a client that reconnects late gets all of it.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from typing import Final

import anyio
import msgspec

from causeway_server.router.errors import InvalidRequest
from causeway_server.router.jobs.job import FINAL_STATES, JobState
from causeway_server.router.jobs.submission import answer_text

from ...storage.redis_client import JobStoreRefused, Reply, as_fields, as_list, as_text
from ...storage.stores import JobStores

_ID = re.compile(r"([0-9]{1,18}-[0-9]{1,18})(?:\.([0-9]{1,9})-([0-9]{1,9}))?")
_BLOCK_MS = 2000
_BATCH = 256  # entries of one read
_FOLLOW_EVERY_S = 3.0  # a third of how long it holds
_SILENT_BLOCKS = 7  # without an event; then a comment keeps proxies from closing the connection
COMMENT: Final = b": still there\n\n"
_OF_A_RUN = frozenset(("running", "progress"))
_EVENTS = frozenset((*JobState, "progress"))  # others are of an earlier version
_LAST_EVENTS = frozenset((*FINAL_STATES, "job.revised", "job.not_revised"))  # the last two of an earlier version


class Position(msgspec.Struct, frozen=True):
    """Position of a client: the states up to an entry of the job's stream, and a part of a run's text."""

    state: str = "0-0"
    run: int = 0  # fence of the run; 0 if none has begun
    characters: int = 0

    @property
    def event_id(self) -> str:
        return f"{self.state}.{self.run}-{self.characters}" if self.run else self.state


_START: Final = Position()


class _EventData(msgspec.Struct, omit_defaults=True):
    event: str
    run: int = 0
    text: str = ""
    progress: msgspec.Raw | None = None
    error: msgspec.Raw | None = None


def read_last_id(header: str) -> Position:
    """Return the position after which a client continues. Raises InvalidRequest."""
    if not header:
        return _START
    match = _ID.fullmatch(header)
    if match is None:
        raise InvalidRequest("`Last-Event-ID` must be an id of this stream, or absent.")
    return Position(match[1], int(match[2] or 0), int(match[3] or 0))


@dataclass(eq=False, repr=False)
class EventReader:
    """Reader of the events of one job after a position."""

    stores: JobStores
    job: str
    owner: str
    last: Position = _START  # position up to which the client has received events
    _: KW_ONLY
    check: Callable[[], object] = lambda: None  # called at least every 2 s; any error that it raises ends the events
    with_text: bool = True  # whether to send the text, which the worker then stores
    _followed_at: float = float("-inf")

    def __post_init__(self) -> None:
        self._read_text = f"{self.last.run}-{self.last.characters}"  # last entry that was read

    async def read(self) -> AsyncGenerator[bytes, None]:
        """Yield SSE bytes until the job's end or its events' expiry. Raises JobStoreUnavailable or RecordUnreadable."""
        silent, has_ended = 0, await self._is_over()
        while not has_ended:
            states, texts = await self._wait()
            self.check()
            name = ""
            for event in self._deltas(texts):
                yield event
            for entry in states:
                fields = as_fields(as_list(entry)[1])
                name = fields["event"].decode()
                async for event in self._state(as_text(as_list(entry)[0]), name, fields):
                    yield event
            for event in self._deltas(texts) if name in _OF_A_RUN else ():  # of a run that began meanwhile
                yield event
            silent = 0 if states or texts else silent + 1
            if silent >= _SILENT_BLOCKS:
                silent = 0
                yield COMMENT
            has_ended = (name in _LAST_EVENTS or not (states or texts)) and await self._is_over()

    async def _wait(self) -> tuple[list[Reply], list[Reply]]:
        """Return new entries of the states and of the text, after at most 2 s."""
        keys, last = [self.stores.database.key("events", self.job)], [self.last.state]
        if self.with_text:
            keys.append(self.stores.database.key("text", self.job))
            last.append(self._read_text)
            if anyio.current_time() - self._followed_at >= _FOLLOW_EVERY_S:
                with suppress(JobStoreRefused):  # a full Redis: the states come without the text on its way
                    await self.stores.jobs.texts.follow(self.job)
                self._followed_at = anyio.current_time()
        command = ("XREAD", "COUNT", _BATCH, "BLOCK", _BLOCK_MS, "STREAMS")
        rows = [as_list(row) for row in as_list(await self.stores.database.command(*command, *keys, *last))]
        entries_of = {as_text(key): as_list(entries) for key, entries in rows}
        states, texts = entries_of.get(keys[0], []), entries_of.get(keys[-1], []) if self.with_text else []
        if texts:
            self._read_text = as_text(as_list(texts[-1])[0])
        return states, texts

    async def _is_over(self) -> bool:
        """Return whether no event will come after the last one."""
        database = self.stores.database
        newest = as_list(await database.command("XREVRANGE", database.key("events", self.job), "+", "-", "COUNT", 1))
        if not newest:
            return True
        entry_id, fields = as_list(newest[0])
        is_known = _order(as_text(entry_id)) <= _order(self.last.state)
        return is_known and as_fields(fields)["event"].decode() in _LAST_EVENTS

    async def _state(self, entry_id: str, name: str, fields: dict[str, bytes]) -> AsyncGenerator[bytes, None]:
        raw = msgspec.Raw(fields["data"]) if fields["data"] else None
        if name == JobState.SUCCEEDED and self.with_text:
            text = answer_text(await self.stores.jobs.read_result(self.job, self.owner))
            if delta := self._delta(0, text):
                yield delta
        run = int(fields.get("run") or 0)
        self.last = (
            Position(entry_id, run, 0) if run > self.last.run else msgspec.structs.replace(self.last, state=entry_id)
        )
        if name == "progress":
            yield self._encode(_EventData(name, progress=raw))
        elif name in _EVENTS:
            yield self._encode(_EventData(name, run, error=raw))

    def _deltas(self, texts: list[Reply]) -> Iterator[bytes]:
        """Encode the part of the run's text that the client has not received."""
        for entry in texts:
            part = self.stores.jobs.texts.read(self.owner, self.job, entry)
            if part.fence == self.last.run and (delta := self._delta(part.start, part.text)):
                yield delta

    def _delta(self, start: int, text: str) -> bytes:
        """Encode the part of a text from `start` that the client lacks; b"" if there is none, or a gap before."""
        known = self.last.characters - start
        if not 0 <= known < len(text):
            return b""
        self.last = msgspec.structs.replace(self.last, characters=start + len(text))
        return self._encode(_EventData("delta", self.last.run, text[known:]))

    def _encode(self, data: _EventData) -> bytes:
        return f"id: {self.last.event_id}\nevent: {data.event}\ndata: ".encode() + msgspec.json.encode(data) + b"\n\n"


def _order(entry_id: str) -> tuple[int, int]:
    time, _, sequence = entry_id.partition("-")
    return int(time), int(sequence)
