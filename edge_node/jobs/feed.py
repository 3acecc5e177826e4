"""The text of answers while jobs run, for those who follow their events."""

from __future__ import annotations

import asyncio


class _Signal:
    """Wakes everything that waits for a change."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    async def change(self, seconds: float) -> None:
        """Wait for the next change, at most so long."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await asyncio.wait([future], timeout=seconds)
        finally:
            self._waiting.discard(future)

    def wake(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(None)


class RunningText(_Signal):
    """The text of the only choice of one run, as far as it came."""

    def __init__(self, run: int) -> None:
        super().__init__()
        self.run = run
        self.text = ""
        self.ended = False  # what it ended with is in the store

    def append(self, text: str) -> None:
        self.text += text
        self.wake()


class JobFeed(_Signal):
    """The texts of all jobs that run, by the job's number. It changes when a run starts or ends."""

    def __init__(self) -> None:
        super().__init__()
        self._texts: dict[int, RunningText] = {}

    def start(self, seq: int, run: int) -> RunningText:
        text = self._texts[seq] = RunningText(run)
        self.wake()
        return text

    def get(self, seq: int) -> RunningText | None:
        """None: the job does not run."""
        return self._texts.get(seq)

    def end(self, seq: int) -> None:
        """The run ended, and its end is stored."""
        if (text := self._texts.pop(seq, None)) is not None:
            text.ended = True
            text.wake()
        self.wake()
