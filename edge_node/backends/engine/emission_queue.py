"""The emissions of one request's jobs, on their way from the child to the request."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Self

from models.llama_cpp.process.parent import EngineProcess
from models.llama_cpp.protocol import Emission, Job
from router.errors import CausewayError, DeadlineExceeded, EngineCrashed


class EmissionQueue:
    """Submits the jobs on enter, cancels the unfinished ones on exit.

    At most `at_once` jobs are in the child at a time, so that a long list of prompts neither overflows its queue nor
    keeps other requests waiting. `deadline`: the loop's clock.
    """

    def __init__(self, process: EngineProcess, jobs: Sequence[Job], deadline: float, at_once: int) -> None:
        self._process = process
        self._jobs = jobs
        self._first = jobs[:at_once]
        self._later = deque(jobs[at_once:])
        self._deadline = deadline
        self._items: list[Emission] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: CausewayError | None = None
        self._has_emissions = False

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        # The engine enforces the deadline too; this timer is the backstop if the engine does not answer.
        self._timer = self._loop.call_at(self._deadline, self._expire)
        self._process.submit(self._first, self)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._process.cancel(job.id for job in self._jobs)

    async def get(self) -> list[Emission]:
        """All emissions since the last call, at least one. Raises the error that ended the jobs."""
        while not self._items:
            if self._error is not None:
                raise self._error
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items, self._items = self._items, []
        return items

    def put(self, emissions: list[Emission]) -> None:
        self._has_emissions = True
        self._items += emissions
        if self._later:
            self._submit_more(emissions)
        self._wake()

    def engine_lost(self, reason: str) -> None:
        self._error = EngineCrashed(reason, phase="stream" if self._has_emissions else "first_token")
        self._wake()

    def _submit_more(self, emissions: list[Emission]) -> None:
        """Submit one job for each that has ended."""
        ended = sum(emission.finish_reason is not None for emission in emissions)
        jobs = [self._later.popleft() for _ in range(min(ended, len(self._later)))]
        if jobs:
            self._process.submit(jobs, self)

    def _expire(self) -> None:
        self._error = DeadlineExceeded("the deadline passed before the answer was complete")
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
