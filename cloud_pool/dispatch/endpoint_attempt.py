"""One attempt of an inference request on one endpoint, up to its first delta and then through its answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

import msgspec

from router.errors import CausewayError, ClientGone, CloudFailed

from ..upstreams.triton.tensors import Delta, InferenceRequest
from .first_token_latency import FirstTokenLatency
from .protocols import EndpointLease


class EndpointAttempt:
    """Owns a lease and a call, until `begin` fails or `answer` ends."""

    def __init__(
        self,
        lease: EndpointLease,
        request: InferenceRequest,
        latency: FirstTokenLatency,
        clock: Callable[[], float],
    ) -> None:
        self.endpoint = lease.endpoint
        self._lease = lease
        self._trace = None if request.trace is None else request.trace.call(request.model, lease.endpoint)
        if self._trace is not None:
            request = msgspec.structs.replace(request, traceparent=self._trace.traceparent)
        self._deltas = lease.triton.generate(request)
        self._latency = latency
        self._clock = clock
        self._first: Delta | None = None

    async def begin(self) -> None:
        """Wait for the first delta; an attempt without one is closed. Raises CausewayError."""
        began_at = self._clock()
        try:
            self._first = await anext(self._deltas, None)
            if self._first is None:
                raise CloudFailed("the endpoint's answer ended before its first token", phase="first_token")
        except CausewayError as error:
            self._failed(error)
            raise
        finally:
            if self._first is None:
                await self._close()
        now = self._clock()
        self._lease.first_token(now - began_at)
        self._latency.first_token(self.endpoint, now - began_at, now)
        if self._trace is not None:
            self._trace.first_token()

    async def answer(self) -> AsyncGenerator[Delta, None]:
        """Yield every delta, the first one included; call it after `begin`. Closes this attempt at its end.

        Raises:
            CausewayError: The endpoint's.
        """
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
            await self._close()

    async def _close(self) -> None:
        """Cancel the call if it still runs."""
        try:
            await self._deltas.aclose()
        finally:
            self._lease.close()
            if self._trace is not None:
                self._trace.end(ClientGone.code)  # No effect on a trace that has already ended.

    def _failed(self, error: CausewayError) -> None:
        self._lease.failed(error)
        if self._trace is not None:
            self._trace.end(error.code)
