"""The text of answers while they are made, for clients that follow the events of their jobs.

1. Each run keeps its text, as far as it came.
2. While a client follows the job, what is new goes to Redis: of all runs of the worker in one call, at most ten times a
   second. The end of a run waits for none of this: its result has the whole text.
3. Redis replies how much it has. Where it has less than was sent, the rest is sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

import anyio

from router.errors import JobStoreUnavailable

from ...storage.jobs.job_store import JobStore
from ...storage.jobs.replies import LiveText
from ...storage.record import JobRecord

MAX_CHARACTERS: Final = 262_144
"""Of one run's text; what is beyond comes with the result."""
_INTERVAL_S = 0.1
_OUTDATED = -1


class RunText:
    """The text of one run. `wake` is called when there is something to send."""

    def __init__(self, record: JobRecord, wake: Callable[[], None]) -> None:
        self.job = record.id
        self._owner = record.owner
        self._fence = record.fence
        self._followed = bool(record.followed)
        self._wake = wake
        self._text = ""
        self._parts: list[str] = []  # behind `_text`
        self._length = 0
        self._stored = 0  # characters in Redis

    def append(self, part: str) -> None:
        """Keep the next part, unless the text is too long."""
        if self._length + len(part) > MAX_CHARACTERS:
            self._length = MAX_CHARACTERS  # a text with a gap would be worse than none
            return
        self._length += len(part)
        self._parts.append(part)
        if self._followed:
            self._wake()

    def set_followed(self, followed: bool) -> None:
        """Record whether a client follows the job now."""
        if followed and not self._followed:
            self._wake()
        self._followed = followed

    def unsent(self) -> LiveText | None:
        """Return what Redis does not have; None where nothing is to be sent."""
        if not self._followed:
            return None
        self._text += "".join(self._parts)
        self._parts.clear()
        rest = self._text[self._stored :]
        return LiveText(self._owner, self.job, self._fence, self._stored, rest) if rest else None

    def set_stored(self, characters: int) -> None:
        """Record how much Redis has."""
        if characters == _OUTDATED:
            self._followed = False
        elif characters < len(self._text):
            self._wake()
        self._stored = max(characters, 0)


class TextPublisher:
    """Sends the texts of a worker's runs."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._texts: set[RunText] = set()
        self._changed = anyio.Event()

    def open(self, record: JobRecord) -> RunText:
        """Return the text of a run that begins."""
        text = RunText(record, self._wake)
        self._texts.add(text)
        return text

    def _wake(self) -> None:
        self._changed.set()

    def close(self, text: RunText) -> None:
        """The run has ended."""
        self._texts.discard(text)

    def set_followed(self, jobs: Collection[str]) -> None:
        """Record which jobs are followed now."""
        for text in self._texts:
            text.set_followed(text.job in jobs)

    async def run(self) -> None:
        """Send what is new, until cancelled."""
        while True:
            await self._changed.wait()
            self._changed = anyio.Event()
            await self._send()
            await anyio.sleep(_INTERVAL_S)

    async def _send(self) -> None:
        sending = [(text, part) for text in self._texts if (part := text.unsent()) is not None]
        if not sending:
            return
        try:
            replies = await self._store.texts.append([part for _, part in sending])
        except JobStoreUnavailable:
            self._changed.set()  # again after the interval
            return
        for (text, _), stored in zip(sending, replies, strict=True):
            text.set_stored(stored)
