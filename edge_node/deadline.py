"""A deadline around awaits, for where a request passes several of them: `with Bound(when): …`.

It does what `asyncio.timeout_at` does (which Python 3.10 lacks), at a third of the cost.
"""

from __future__ import annotations

import asyncio
import sys
from types import TracebackType
from typing import final


@final
class Deadline:
    """Ends its body at `when` (the loop's clock): raises asyncio.TimeoutError. Not to be held over a yield to a caller.

    A cancellation from elsewhere passes through, also when both come at once.
    """

    __slots__ = ("_cancelling", "_expired", "_task", "_timer", "_when")

    def __init__(self, when: float) -> None:
        self._when = when
        self._expired = False

    def __enter__(self) -> Deadline:
        task = asyncio.current_task()
        assert task is not None, "a bound is for awaits, and these need a task"
        self._task = task
        self._cancelling = _cancelling(task)
        self._timer = asyncio.get_running_loop().call_at(self._when, self._expire)
        return self

    def move(self, when: float) -> None:
        """From now on it ends at `when`."""
        self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(when, self._expire)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._timer.cancel()
        if self._expired and _uncancel(self._task) <= self._cancelling and kind is asyncio.CancelledError:
            raise asyncio.TimeoutError from error

    def _expire(self) -> None:
        self._expired = True
        self._task.cancel()


if sys.version_info >= (3, 11):

    def _cancelling(task: asyncio.Task[object]) -> int:
        return task.cancelling()

    def _uncancel(task: asyncio.Task[object]) -> int:
        return task.uncancel()

else:  # nobody counts there: a cancellation that comes in the very turn of the deadline is taken for it

    def _cancelling(task: asyncio.Task[object]) -> int:
        return 0

    def _uncancel(task: asyncio.Task[object]) -> int:
        return 0
