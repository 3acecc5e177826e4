"""One endpoint's go at an ask, up to its first delta and then through its answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

import msgspec

from router.errors import CausewayError, ClientGone, CloudFailed

from ..upstreams.triton.tensors import Delta, InferenceRequest
from .first_token_latency import FirstTokenLatency
from .protocols import EndpointLease


class EndpointAttempt:
    """Owns a lease and a call: `close` gives both back, whenever it is. `begin` may run in a task of its own; what
    comes after it is read in the caller's, straight from the endpoint's generator."""

    def __init__(
        self, lease: EndpointLease, ask: InferenceRequest, pace: FirstTokenLatency, clock: Callable[[], float]
    ) -> None:
        self.endpoint = lease.endpoint
        self._lease = lease
        self._trace = None if ask.trace is None else ask.trace.call(ask.model, lease.endpoint)
        if self._trace is not None:
            ask = msgspec.structs.replace(ask, traceparent=self._trace.traceparent)
        self._deltas = lease.triton.generate(ask)
        self._pace = pace
        self._clock = clock
        self._began_at = 0.0
        self._first: Delta | None = None

    async def begin(self) -> None:
        """Until the first delta is here. Raises CausewayError."""
        self._began_at = self._clock()
        try:
            self._first = await anext(self._deltas)
        except StopAsyncIteration:
            error = CloudFailed("the answer ended before it began", phase="first_token")
            self._failed(error)
            raise error from None
        except CausewayError as error:
            self._failed(error)
            raise
        now = self._clock()
        self._lease.first_token(now - self._began_at)
        self._pace.first_token(self.endpoint, now - self._began_at, now)
        if self._trace is not None:
            self._trace.first_token()

    async def answer(self) -> AsyncGenerator[Delta, None]:
        """After `begin`: every delta, the first one again. Raises CausewayError; closes this try at its end."""
        assert self._first is not None
        try:
            yield self._first
            async for delta in self._deltas:
                yield delta
        except CausewayError as error:
            self._failed(error)
            raise
        else:
            self._lease.succeeded()
            if self._trace is not None:
                self._trace.end()
        finally:
            await self.close()

    def given_up(self) -> None:
        """Another try's delta came first: how long this one was waited for tells about the tier."""
        if self._first is None and self._began_at:
            now = self._clock()
            self._pace.given_up(self.endpoint, now - self._began_at, now)

    async def close(self) -> None:
        """Cancels the call if it runs. The task that is in `begin`, if any, must have ended."""
        try:
            await self._deltas.aclose()
        finally:
            self._lease.close()
            if self._trace is not None:
                self._trace.end(ClientGone.code)  # unless it had its end

    def _failed(self, error: CausewayError) -> None:
        self._lease.failed(error)
        if self._trace is not None:
            self._trace.end(error.code)
