"""An attempt at a tier: a permit and the first delta of the answer, within the time that the fallback step allows.

The sequences of one request run in Triton concurrently, and their streams are merged.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from types import TracebackType
from typing import Protocol, Self, TypeVar

import anyio
import msgspec

from causeway_server.router import errors
from causeway_server.router.residency import check_region, regions_of

from ..admission import AdmissionController, Permit, Preempted, Priority
from ..admission.controller import Acquired
from ..core.request_context import RequestContext
from ..dispatch.dispatcher import EndpointAttempt
from ..tiers.tier import Tier
from ..upstreams.inference import Delta, InferenceRequest
from .fallback import FallbackRequest, FallbackStep, TierFallback
from .tier_health import Stress

BuildRequests = Callable[[], Sequence[InferenceRequest]]
T = TypeVar("T")


class TierDispatch(Protocol):
    """Interface of `dispatch.dispatcher.Dispatcher`."""

    @property
    def by_prefix(self) -> bool: ...

    def begin(self, request: InferenceRequest, key: bytes = b"") -> EndpointAttempt | None: ...

    def generate(
        self, request: InferenceRequest, key: bytes = b"", begun: EndpointAttempt | None = None
    ) -> AsyncGenerator[Delta, None]: ...


class TierRuntime(msgspec.Struct, frozen=True):
    """A tier with its admission and its dispatcher."""

    tier: Tier
    admission: AdmissionController
    dispatch: TierDispatch


class TierFailed(Exception):
    """The tier itself failed before its first delta, so another tier may be tried."""

    def __init__(self, error: errors.CausewayError, stress: Stress) -> None:
        super().__init__(error.code)
        self.error = error
        self.stress = stress


def sole_attempt(
    context: RequestContext, runtimes: Mapping[str, TierRuntime], fallback: TierFallback, clock: Callable[[], float]
) -> TierAttempt:
    """Return the attempt at the requested tier, for requests that no other tier may answer."""
    name = context.tier.name
    only = FallbackRequest(name, context.deadline - clock(), critical=True)
    (step,) = fallback.fallback_steps(only, context.priority)
    return TierAttempt(fallback, step, runtimes[name], clock)


class TierAttempt:
    """An attempt at one tier, whose context stops its work and returns its permits.

    After `begin`, the later deltas are in `stream`, or for several sequences, numbered by sequence, in `merged`.
    """

    def __init__(
        self, fallback: TierFallback, step: FallbackStep, runtime: TierRuntime, clock: Callable[[], float]
    ) -> None:
        self.stream: AsyncGenerator[Delta, None] | None = None
        self.merged: AsyncGenerator[tuple[int, Delta], None] = merge_streams([])
        self.permit: Permit | None = None  # the first one
        self.call: EndpointAttempt | None = None  # of `begin_now`
        self._permits: Acquired | None = None
        self._began: float | None = None  # when `begin_now` did
        self._refusal: errors.CausewayError | None = None  # by admission, in `begin_now`
        self._sent_at: float | None = None  # when Triton got the request, or the first of its sequences
        self._first_took_s: float | None = None  # until the first token of all sequences, from its own start
        self._fallback = fallback
        self._step = step
        self._tier = runtime.tier
        self._admission = runtime.admission
        self._dispatch = runtime.dispatch
        self._clock = clock

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await (self.merged if self.stream is None else self.stream).aclose()
            if self.call is not None:
                await self.call.close()
        finally:
            self.leave()

    def begin_now(self, context: RequestContext, build_requests: BuildRequests, key: bytes) -> EndpointAttempt | None:
        """Begin one sequence without waiting, and return the attempt, yet to be sent; None: `begin` does the rest."""
        now, scheduler = self._clock(), self._admission.scheduler
        left_s = context.deadline - now
        if left_s <= 0.0 or not scheduler.has_room:
            return None
        if not self._fallback.may_try(self._step):
            return None
        self._began = now
        try:
            if self._arrive(context, left_s)[0].grant is None:
                self.call = self._dispatch.begin(build_requests()[0], key)
        except errors.CausewayError as error:
            self._refusal = error if self.permit is None else None
        return self.call

    def got_first_token(self, took_s: float) -> None:
        """Report the first token of a call in callbacks."""
        assert self.permit is not None
        self.permit.first_token(took_s)
        self._fallback.on_first_token(self._step.tier, took_s)

    def rest(self) -> AsyncGenerator[Delta, None]:
        """Return what follows the first token of a call in callbacks, as `stream`."""
        begun, self.call = self.call, None
        assert begun is not None
        self.stream = self._dispatch.generate(begun.request, begun=begun)
        return self.stream

    def leave(self) -> None:
        if self._permits is not None:
            self._permits.leave()

    def timeout_s(self, context: RequestContext, left_s: float) -> float:
        """Return the time that the step has for its first token, with `left_s` until the deadline."""
        return self._fallback.first_token_timeout_s(self._step, context.priority, left_s)

    async def begin(self, context: RequestContext, build_requests: BuildRequests, key: bytes) -> tuple[int, Delta]:
        """Return the first delta and its sequence's number. Call it once, in the attempt's context.

        Args:
            build_requests: Renders a request for each sequence; called only with a permit, because it is expensive.
            key: Prefix key for load balancing.

        Raises:
            TierFailed: Another tier may succeed; also where this one is outside the regions that bind the request.
            CausewayError: No other tier would succeed. Faults of the request itself are reported by the requested tier.
        """
        tier, now = self._step.tier, self._clock()
        began = now if self._began is None else self._began
        if context.request.hints.tags:
            self._check_region(context)
        if self._began is None and not self._fallback.may_try(self._step):
            wait_s = self._fallback.retry_after_s(tier)
            raise TierFailed(
                errors.BreakerOpen(f"{tier} failed repeatedly, so its breaker is open.", retry_after_s=wait_s), "broken"
            )
        left_s = context.deadline - began
        timeout_s = self.timeout_s(context, left_s)
        try:
            if timeout_s >= left_s:
                return await self._first(context, build_requests, key)
            # Not anyio's cancel scope: the generators that begin in here have scopes of their own and outlive it.
            async with asyncio.timeout(timeout_s - (now - began)):
                return await self._first(context, build_requests, key)
        except TimeoutError:
            if self._step.trial:
                self._fallback.on_cancel(tier)
                raise TierFailed(self._timeout_error(context.priority, timeout_s), "slow") from None
            self._report_overload()
            stress = self._fallback.on_timeout(tier, self._in_triton_s)
            raise TierFailed(self._timeout_error(context.priority, timeout_s), stress) from None
        except errors.CausewayError as error:
            if isinstance(error, (errors.QueueFull, errors.DeadlineExceeded)) and not self._step.trial:
                self._report_overload(full=isinstance(error, errors.QueueFull))
            stress = self._fallback.on_failure(tier, error, trial=self._step.trial)
            if isinstance(error, errors.DeadlineExceeded) and not self._step.last:
                stress = "slow" if self._clock() < context.deadline else ""
            if self._step.skipped and isinstance(error, errors.InvalidRequest):
                stress = "unable"
            if not stress:
                raise
            raise TierFailed(error, stress) from error
        except BaseException:
            self._fallback.on_cancel(tier)
            raise

    def _check_region(self, context: RequestContext) -> None:
        """Raise TierFailed if no byte of the request may reach this tier."""
        try:
            place = f"the tier {self._step.tier} (tiers.region)"
            check_region(regions_of(context.request.hints.tags), self._tier.config.region, place)
        except errors.OutsideRegion as error:
            raise TierFailed(error, "unable") from None

    def report_tokens(self, tokens: int) -> None:
        """Report the tokens of the whole answer at its end, prompt included."""
        if self.permit is not None:
            self.permit.used_tokens = tokens

    @property
    def _in_triton_s(self) -> float | None:
        return None if self._sent_at is None else self._clock() - self._sent_at

    def _report_overload(self, *, full: bool = False) -> None:
        """Tell admission that Triton's queue is full or the first token late, unless little time was left."""
        seconds, permit = self._in_triton_s, self.permit
        if permit is not None and seconds is not None and (full or self._fallback.is_late(self._step.tier, seconds)):
            permit.failed()

    def _timeout_error(self, priority: Priority, seconds: float) -> errors.CausewayError:
        if self._sent_at is not None:
            return errors.CloudTimeout(f"{self._step.tier} sent no token within {seconds:.1f} s.")
        wait_s = self._admission.scheduler.expected_wait_s(priority)
        return errors.QueueFull(f"{self._step.tier} had no capacity within {seconds:.1f} s.", retry_after_s=wait_s)

    async def _first(self, context: RequestContext, build_requests: BuildRequests, key: bytes) -> tuple[int, Delta]:
        """Return the first delta. Each of several sequences is a separate call, started when its permit is granted."""
        sequences = context.request.sequences
        if sequences > 1:
            self._tier.check_sequences(context.request)
        if self._refusal is not None:
            raise self._refusal
        permit = self.permit
        permits: Sequence[Permit] = ()
        if permit is None:
            permits = self._arrive(context, context.deadline - self._clock())
            permit = permits[0]
        requests: list[InferenceRequest] = []

        def build(index: int) -> InferenceRequest:
            if not requests:
                if context.trace is not None:
                    context.trace.admitted()
                requests.extend(build_requests())
            return requests[index]

        if sequences == 1:
            if self.call is None:  # else it was granted, and may be revoked by now
                await permit.granted()
            self.stream, delta, self._first_took_s = await self._send(permit, partial(build, 0), key)
            first = 0, delta
        else:
            self.merged = merge_streams(
                [self._sequence(permit, partial(build, index), key) for index, permit in enumerate(permits)]
            )
            first = await anext(self.merged)
        assert self._first_took_s is not None
        self._fallback.on_first_token(self._step.tier, self._first_took_s)
        return first

    def _arrive(self, context: RequestContext, left_s: float) -> Sequence[Permit]:
        """Return the permits of the request, which may be granted later. Raises as `AdmissionController.acquire`."""
        sequences, tokens = context.request.sequences, context.tokens
        acquired = self._admission.acquire(
            sequences, context.priority, left_s, context.tenant, context.weight, tokens, preemptible=True
        )
        permits = acquired.enter()
        self._permits, self.permit = acquired, permits[0]
        return permits

    async def _sequence(
        self, permit: Permit, build: Callable[[], InferenceRequest], key: bytes
    ) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of one of several sequences; if one fails or is cancelled, the whole request is."""
        await permit.granted()
        stream, delta, took_s = await self._send(permit, build, key)
        self._first_took_s = self._first_took_s or took_s
        async with aclosing(stream):
            yield delta
            tokens, prompt_tokens = delta.new_tokens, delta.input_tokens
            try:
                async for delta in stream:
                    yield delta
                    tokens, prompt_tokens = tokens + delta.new_tokens, delta.input_tokens
            except errors.CausewayError:
                if delta.finish_reason is None:  # otherwise this sequence is whole
                    raise
        permit.used_tokens = prompt_tokens + tokens
        permit.release()

    async def _send(
        self, permit: Permit, build: Callable[[], InferenceRequest], key: bytes
    ) -> tuple[AsyncGenerator[Delta, None], Delta, float]:
        """Send a sequence, again after each preemption. Return its deltas, the first one and its delay."""
        while True:
            stream: AsyncGenerator[Delta, None] | None = None
            begun, self.call = self.call, None
            try:
                with permit:
                    request, sent_at = (build(), self._clock()) if begun is None else (begun.request, begun.began_at)
                    stream = self._dispatch.generate(request, key, begun)
                    self._sent_at = self._sent_at or sent_at
                    delta = await anext(stream, None)
                    if delta is None:
                        raise errors.StreamBroken("The model ended without an answer.", phase="first_token")
                    took_s = self._clock() - sent_at
                    permit.first_token(took_s)
                return stream, delta, took_s
            except BaseException as error:
                if stream is not None:
                    await stream.aclose()
                elif begun is not None:
                    await begun.close()
                if not isinstance(error, Preempted):
                    raise
            self._sent_at = None
            await permit.granted()


async def merge_streams(streams: list[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield the streams' items as they come, with the index. The first error ends all, as closing does."""
    # At most one item waits for each stream, so a slow reader slows Triton's streams down.
    ready: asyncio.Queue[tuple[int, T] | errors.CausewayError | None] = asyncio.Queue(len(streams))
    failure: errors.CausewayError | None = None
    async with anyio.create_task_group() as tasks:
        for index, stream in enumerate(streams):
            tasks.start_soon(_pump, index, stream, ready)
        try:
            remaining = len(streams)
            while remaining and failure is None:
                entry = await ready.get()
                if isinstance(entry, errors.CausewayError):
                    failure = entry  # Raised below: a task group would wrap it.
                elif entry is None:
                    remaining -= 1
                else:
                    yield entry
        except GeneratorExit:
            pass  # Closed: a task group would wrap it.
        finally:
            tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _pump(
    index: int, stream: AsyncGenerator[T, None], ready: asyncio.Queue[tuple[int, T] | errors.CausewayError | None]
) -> None:
    try:
        async with aclosing(stream):
            async for item in stream:
                await ready.put((index, item))
    except errors.CausewayError as error:
        await ready.put(error)
    except Exception as error:  # The reader waits for an entry, so every failure has to reach it.
        await ready.put(errors.CloudFailed(f"An answer failed: {type(error).__name__}.", phase="stream"))
    else:
        await ready.put(None)
