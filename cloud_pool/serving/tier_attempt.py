"""One rung's go: a place in its tier, and the first delta of its answer, within the time that the ladder gives it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Protocol

from router.errors import (
    BreakerOpen,
    CausewayError,
    CloudTimeout,
    DeadlineExceeded,
    InvalidRequest,
    QueueFull,
    StreamBroken,
)

from ..admission import AdmissionController, Permit, Preempted, Priority
from ..degradation.fallback import TierFallback
from ..degradation.fallback_plan import FallbackStep
from ..degradation.tier_health import Stress
from ..upstreams.triton.tensors import Delta, InferenceRequest
from .request_context import RequestContext
from .stream_merge import merge_streams


class TierDispatch(Protocol):
    """dispatch.dispatch.Dispatch."""

    def generate(
        self, ask: InferenceRequest, key: bytes = b"", *, hedged: bool = True
    ) -> AsyncGenerator[Delta, None]: ...


class TierFailed(Exception):
    """Nothing came from the rung, for a reason of its own: the next one may be asked."""

    def __init__(self, error: CausewayError, stress: Stress) -> None:
        super().__init__(error.code)
        self.error = error
        self.stress = stress


class TierAttempt:
    """After `begin` the deltas that follow the first are in `only`, or numbered by prompt in `many`."""

    def __init__(
        self,
        ladder: TierFallback,
        fallback_step: FallbackStep,
        admission: AdmissionController,
        dispatch: TierDispatch,
        clock: Callable[[], float],
    ) -> None:
        self.only: AsyncGenerator[Delta, None] | None = None
        self.many: AsyncGenerator[tuple[int, Delta], None]
        self.place: Permit | None = None
        self._handed: float | None = None  # when Triton got it
        self._ladder = ladder
        self._rung = fallback_step
        self._admission = admission
        self._dispatch = dispatch
        self._clock = clock

    async def begin(
        self, held: AsyncExitStack, call: RequestContext, asks: Callable[[], Sequence[InferenceRequest]], key: bytes
    ) -> tuple[int, Delta]:
        """The first delta and its prompt's number. `held` gives the place and the work back; `asks` is called with a
        place only, for it costs something. Raises Fell, or CausewayError where no other rung would do better: what is
        wrong with a request is for the tier to say that was asked for."""
        tier, began = self._rung.tier, self._clock()
        if not self._ladder.may_try(self._rung):
            wait_s = self._ladder.retry_after_s(tier)
            raise TierFailed(BreakerOpen(f"{tier} failed repeatedly and is left alone", retry_after_s=wait_s), "broken")
        left_s = call.deadline - began
        first_token_timeout_s = self._ladder.first_token_timeout_s(self._rung, call.priority, left_s)
        try:
            if first_token_timeout_s < left_s:
                # No cancel scope of anyio's: the generators that begin in here have theirs, and outlive this one.
                async with asyncio.timeout(first_token_timeout_s):
                    first = await self._first(held, call, asks, key, left_s)
            else:
                first = await self._first(held, call, asks, key, left_s)
        except TimeoutError:
            self._blame_door()
            stress = self._ladder.overdue(tier, self._in_triton_s)
            raise TierFailed(self._too_late(call.priority, first_token_timeout_s), stress) from None
        except CausewayError as error:
            if isinstance(error, (QueueFull, DeadlineExceeded)):
                self._blame_door(full=isinstance(error, QueueFull))
            stress = self._ladder.failed(tier, error)
            if isinstance(error, DeadlineExceeded) and not self._rung.last:
                stress = "slow" if self._clock() < call.deadline else ""
            if self._rung.above and isinstance(error, InvalidRequest):
                stress = "unable"
            if not stress:
                raise
            raise TierFailed(error, stress) from error
        except BaseException:
            self._ladder.left(tier)
            raise
        return first

    @property
    def _in_triton_s(self) -> float | None:
        return None if self._handed is None else self._clock() - self._handed

    def _blame_door(self, *, full: bool = False) -> None:
        """It let in more than the tier can take: Triton says so, or is silent for longer than it should be. Who came in
        with no time left says nothing about that."""
        seconds = self._in_triton_s
        if self.place is not None and seconds is not None and (full or self._ladder.is_late(self._rung.tier, seconds)):
            self.place.failed()

    def _too_late(self, priority: Priority, seconds: float) -> CausewayError:
        if self._handed is not None:
            return CloudTimeout(f"{self._rung.tier} gave no token in {seconds:.1f} s")
        wait_s = self._admission.queue_seconds(priority)
        return QueueFull(f"{self._rung.tier} had no place in {seconds:.1f} s", retry_after_s=wait_s)

    def used(self, tokens: int) -> None:
        """Prompt and answer, at its end."""
        if self.place is not None:
            self.place.used(tokens)

    async def _first(
        self,
        held: AsyncExitStack,
        call: RequestContext,
        asks: Callable[[], Sequence[InferenceRequest]],
        key: bytes,
        left_s: float,
    ) -> tuple[int, Delta]:
        door = self._admission.place(call.priority, left_s, call.tenant, call.weight, call.tokens, preemptible=True)
        place = self.place = await held.enter_async_context(door)
        if call.trace is not None:
            call.trace.admitted()
        while True:
            try:
                async with AsyncExitStack() as work:
                    async with place.held():
                        first, took_s = await self._handed_over(work, call, asks, key)
                        place.first_token(took_s)
                    await held.enter_async_context(work.pop_all())
            except Preempted:
                self._handed = None
                await place.reacquired()
            else:
                self._ladder.spoke(self._rung.tier, took_s)
                return first

    async def _handed_over(
        self, work: AsyncExitStack, call: RequestContext, asks: Callable[[], Sequence[InferenceRequest]], key: bytes
    ) -> tuple[tuple[int, Delta], float]:
        """The first delta, and how long it took."""
        answers = [self._dispatch.generate(ask, key, hedged=call.priority != "bulk") for ask in asks()]
        handed = self._handed = self._clock()
        try:
            first = await self._next(work, answers)
        except StopAsyncIteration:
            raise StreamBroken("the model ended without saying anything", phase="first_token") from None
        return first, self._clock() - handed

    async def _next(self, held: AsyncExitStack, answers: list[AsyncGenerator[Delta, None]]) -> tuple[int, Delta]:
        if len(answers) == 1:
            self.only = answers[0]
            held.push_async_callback(self.only.aclose)
            return 0, await anext(self.only)
        self.many = merge_streams(answers)
        held.push_async_callback(self.many.aclose)
        return await anext(self.many)
