"""Two attempts at once until one has its first delta: that one goes on, the other is cancelled.

The tasks live only until then. The winner's generator was started in one of them and is read on in the caller's task,
so nothing stands between the endpoint and the caller for the rest of the answer, and no task outlives the race.
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
    """One round with a hedge. `errors` are those of the attempts that failed, oldest first."""

    def __init__(
        self,
        first: EndpointAttempt,
        hedge: Callable[[bool], EndpointAttempt | None],
        hedge_after_s: float,
        urgent_hedge_after_s: float,
    ) -> None:
        """Create the race.

        Args:
            hedge: Starts the second attempt, or returns None if it may not. Called with False once the first attempt
                has taken `hedge_after_s`, and if that returned None again with True after `urgent_hedge_after_s`.
        """
        self.errors: list[CausewayError] = []
        self._first = first
        self._hedge = hedge
        self._waits = ((hedge_after_s, False), (urgent_hedge_after_s - hedge_after_s, True))
        self._second: EndpointAttempt | None = None
        self._winner: EndpointAttempt | None = None
        self._unexpected: Exception | None = None
        self._running = 0
        self._settled = anyio.Event()

    async def run(self) -> EndpointAttempt | None:
        """Return the attempt that has its first delta, open; None: all failed. Every other attempt is closed."""
        winner = None
        try:
            async with anyio.create_task_group() as tasks:
                self._start(tasks, self._first)
                for seconds, is_urgent in self._waits:
                    with anyio.move_on_after(seconds):
                        await self._settled.wait()
                    if self._second is None and not self._settled.is_set():
                        self._second = self._hedge(is_urgent)
                        if self._second is not None:
                            self._start(tasks, self._second)
                await self._settled.wait()
                tasks.cancel_scope.cancel()
            if self._unexpected is not None:
                raise self._unexpected
            winner = self._winner
        finally:
            # Closing waits for nothing: every `begin` has ended with the task group.
            for one in (self._first, self._second):
                if one is not None and one is not winner:
                    if winner is not None:
                        one.abandoned()
                    await one.close()
        return winner

    @property
    def outcome(self) -> HedgeOutcome | None:
        """Outcome of the hedge; None if there was none."""
        if self._second is None:
            return None
        if not self._settled.is_set():
            return "cancelled"
        if self._winner is None:
            return "failed"
        return "won" if self._winner is self._second else "lost"

    def _start(self, tasks: TaskGroup, one: EndpointAttempt) -> None:
        self._running += 1
        tasks.start_soon(self._begin, one)

    async def _begin(self, one: EndpointAttempt) -> None:
        try:
            await one.begin()
        except CausewayError as error:
            self.errors.append(error)
        except Exception as unexpected:  # Raised by `run`: a task group would wrap it.
            self._unexpected = unexpected
        else:
            # Both may get their first delta in one turn of the event loop.
            self._winner = self._winner or one
        self._running -= 1
        is_hopeless = bool(self.errors) and retry_rule(self.errors[-1]) == "never"
        if self._winner or self._unexpected or is_hopeless or not self._running:
            self._settled.set()
