"""Two tries at once until one has its first delta: that one goes on, the other is cancelled.

The tasks live only until then. The winner's generator was begun in one of them and is read on in the caller's, so
nothing stands between the endpoint and the caller for the rest of the answer, and no task outlives this module.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio
from anyio.abc import TaskGroup

from router.errors import CausewayError

from .endpoint_attempt import EndpointAttempt
from .protocols import HedgeOutcome
from .retry_rules import retry_rule


class HedgeRace:
    """One round with a hedge. `errors` are those of the tries that failed, oldest first."""

    def __init__(
        self, first: EndpointAttempt, hedge: Callable[[bool], EndpointAttempt | None], late_s: float, very_late_s: float
    ) -> None:
        """`hedge` begins the second try, or has none to begin: asked, with False, when the first has been waited for
        `late_s`, and if it had none again, with True, when that was `very_late_s`."""
        self.errors: list[CausewayError] = []
        self._first = first
        self._hedge = hedge
        self._waits = ((late_s, False), (very_late_s - late_s, True))
        self._second: EndpointAttempt | None = None
        self._winner: EndpointAttempt | None = None
        self._fault: Exception | None = None
        self._running = 0
        self._settled = anyio.Event()

    async def run(self) -> EndpointAttempt | None:
        """The try that has its first delta, open; None: all failed. Every other try is closed, however this ends."""
        winner = None
        try:
            async with anyio.create_task_group() as tasks:
                self._enter(tasks, self._first)
                for seconds, is_very_late in self._waits:
                    with anyio.move_on_after(seconds):
                        await self._settled.wait()
                    if self._second is None and not self._settled.is_set():
                        self._second = self._hedge(is_very_late)
                        if self._second is not None:
                            self._enter(tasks, self._second)
                await self._settled.wait()
                tasks.cancel_scope.cancel()
            if self._fault is not None:
                raise self._fault
            winner = self._winner
        finally:
            # Closing waits for nothing: whatever was begun has ended with the task group.
            for one in (self._first, self._second):
                if one is not None and one is not winner:
                    if winner is not None:
                        one.given_up()
                    await one.close()
        return winner

    @property
    def outcome(self) -> HedgeOutcome | None:
        """Of the hedge; None if there was none."""
        if self._second is None:
            return None
        if not self._settled.is_set():
            return "cancelled"
        if self._winner is None:
            return "failed"
        return "won" if self._winner is self._second else "lost"

    def _enter(self, tasks: TaskGroup, one: EndpointAttempt) -> None:
        self._running += 1
        tasks.start_soon(self._begin, one)

    async def _begin(self, one: EndpointAttempt) -> None:
        try:
            await one.begin()
        except CausewayError as error:
            self.errors.append(error)
        except Exception as fault:  # Raised by `run`: out of a task group it would come wrapped.
            self._fault = fault
        else:
            # Both may come in one turn of the loop.
            self._winner = self._winner or one
        self._running -= 1
        hopeless = bool(self.errors) and retry_rule(self.errors[-1]) == "never"
        if self._winner or self._fault or hopeless or not self._running:
            self._settled.set()
