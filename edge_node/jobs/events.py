"""A job's events as server-sent events: its states, and the text of its answer while it is made.

An event's id is the run and how far it is: `2-17` are 17 characters of run 2, `2-wait` is its end with another run to
follow, `2-end` the end of the job, `2-r1` the first revision of its answer, which replaces all text before it, and
`2-last` that no revision follows. A client that reconnects with `Last-Event-ID` gets what comes after it; the text of
a run that failed is void, and the next run begins at its first character.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable
from typing import Final

import msgspec

from router.errors import InvalidRequest
from router.jobs.job import NOT_REVISED, REVISED, JobState
from router.jobs.submission import answer_text

from .record import EdgeJob
from .running.run import JobFeed
from .store import JobOutbox

COMMENT: Final = b": still there\n\n"
_ID = re.compile(r"([0-9]{1,9})-([0-9]{1,9}|wait|end|last|r[1-9][0-9]{0,2})")
_WAIT, _END = 1 << 40, 1 << 41  # positions after all text
_LAST = _END + 1000  # after all revisions, which are at `_END` and their number
_PLACES = {"wait": _WAIT, "end": _END, "last": _LAST}
_POLL_S = 1.0  # between looks at a job that does not run
_SILENT_POLLS = 15  # then a comment keeps proxies from closing the connection
Position = tuple[int, int]
"""A run, and the characters of its text, or a place after them."""


class _EventData(msgspec.Struct, omit_defaults=True):
    event: str
    text: str = ""
    revision: int = 0
    error: msgspec.Raw | None = None


def read_last_id(header: str) -> Position | None:
    """Return the position after which a client continues; None for the start. Raises InvalidRequest."""
    if not header:
        return None
    match = _ID.fullmatch(header)
    if match is None:
        raise InvalidRequest("`Last-Event-ID` is an id of this stream, or absent")
    return int(match[1]), _read_place(match[2])


def _read_place(text: str) -> int:
    if text.startswith("r"):
        return _END + int(text[1:])
    place = _PLACES.get(text)
    return int(text) if place is None else place


def _show_place(place: int) -> str:
    if _END < place < _LAST:
        return f"r{place - _END}"
    return {_WAIT: "wait", _END: "end", _LAST: "last"}.get(place, str(place))


class OutboxEventReader:
    """Reads the events of one job after a position."""

    def __init__(self, store: JobOutbox, feed: JobFeed, job_id: str, owner: str, last: Position | None) -> None:
        self._store = store
        self._feed = feed
        self._job_id = job_id
        self._owner = owner
        self._last = last or (-1, 0)

    async def read(self, stopping: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
        """Yield events until the one that ends the job, or until `stopping`. Raises NotFound, JobStoreUnavailable."""
        silent = _SILENT_POLLS  # a client that lacks nothing now gets the response's head at once
        while not stopping():
            job, result = await self._store.get(self._job_id, self._owner)
            events = b"".join(self._states(job, result))
            if events:
                yield events
            if job.has_ended and job.late is None:
                return
            silent = 0 if events else silent + 1
            if silent >= _SILENT_POLLS:
                silent = 0
                yield COMMENT
            text = self._feed.get(job.seq)
            if text is None:
                await self._feed.change(_POLL_S)
                continue
            while not text.ended and not stopping():
                if delta := self._delta(text.run, text.text):
                    silent = 0
                    yield delta
                await text.change(_POLL_S)

    def _states(self, job: EdgeJob, result: bytes) -> list[bytes]:
        """The events of a job as it is stored."""
        run, events = job.run, []
        if job.state is JobState.QUEUED and self._last < (0, 0):
            events.append(self._event((run, 0), "queued"))
        if job.state is JobState.RUNNING and (self._last[0] < run or self._last < (0, 0)):
            events.append(self._event((run, 0), "running"))
        if job.state is JobState.WAITING and self._last < (run, _WAIT):
            events.append(self._event((run, _WAIT), "waiting", job.error))
        if job.has_ended and self._last < (run, _END):
            if job.state is JobState.SUCCEEDED and not job.revision:
                events.append(self._delta(run, answer_text(result)))
            events.append(self._event((run, _END), job.state.value, job.error))
        if job.revision and self._last < (run, _END + job.revision):
            place = (run, _END + job.revision)
            events.append(self._event(place, REVISED, text=answer_text(result), revision=job.revision))
        if job.late_error and self._last < (run, _LAST):
            events.append(self._event((run, _LAST), NOT_REVISED, job.late_error, revision=job.revision))
        return events

    def _delta(self, run: int, text: str) -> bytes:
        """The text that this client lacks; empty if it lacks none."""
        known = self._last[1] if self._last[0] == run else 0
        if self._last[0] > run or known >= len(text):
            return b""
        return self._event((run, len(text)), "delta", text=text[known:])

    def _event(self, position: Position, name: str, error: bytes = b"", *, text: str = "", revision: int = 0) -> bytes:
        self._last = position
        run, place = position
        data = msgspec.json.encode(_EventData(name, text, revision, msgspec.Raw(error) if error else None))
        return f"id: {run}-{_show_place(place)}\nevent: {name}\ndata: ".encode() + data + b"\n\n"
