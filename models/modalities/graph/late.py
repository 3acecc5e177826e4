"""Parts that are read on after their request was answered without them, for an answer that may be revised."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from router.types import Modality

from ..process.parent import WorkerFailed, WorkerTimeout
from .branch import ReadPart

PartKey = tuple[Modality, str]
"""The reader of a part, and the part's hash."""


class LateReadings:
    """The readings that may outlast their request. Equal parts are read once."""

    def __init__(self) -> None:
        self._tasks: dict[PartKey, asyncio.Task[ReadPart]] = {}
        self._waiting: dict[PartKey, int] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    async def read(self, key: PartKey, run: Callable[[], Awaitable[ReadPart]], until: float) -> ReadPart:
        """Return what `run` finds; after `until` it goes on without its caller. A caller that is cancelled ends it.

        Raises:
            WorkerTimeout: `until` passed, in the loop's time.
            Refusal, WorkerFailed: as `run`.
        """
        task = self._tasks.get(key)
        if task is None:
            # It outlasts its caller: `close` ends it, and `run` has a deadline of its own.
            task = self._tasks[key] = asyncio.ensure_future(run())
            task.add_done_callback(lambda done: self._ended(key, done))
        self._waiting[key] = self._waiting.get(key, 0) + 1
        try:
            async with asyncio.timeout_at(until):
                return await asyncio.shield(task)
        except TimeoutError:
            raise WorkerTimeout("it took too long") from None
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if task.cancelled() and caller is not None and not caller.cancelling():
                raise WorkerFailed("its reading was ended") from None
            if self._waiting[key] == 1:
                task.cancel()
            raise
        finally:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key]

    def _ended(self, key: PartKey, task: asyncio.Task[ReadPart]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio logs nothing if no caller waits for it

    async def close(self) -> None:
        """End all readings."""
        tasks: Sequence[asyncio.Task[ReadPart]] = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
