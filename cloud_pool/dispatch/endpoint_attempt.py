"""One attempt of an inference request on one endpoint, up to its first delta and then through its answer."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from router.errors import CausewayError, ClientGone, CloudFailed

from ..upstreams.triton.tensors import Delta, InferenceRequest
from .first_token_latency import FirstTokenLatency
from .protocols import EndpointLease


class EndpointAttempt:
    """Owns a lease and a call. Read its deltas after `begin`, report how they end, and close it."""

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
        self.deltas = lease.triton.generate(request)
        self._latency = latency
        self._clock = clock

    async def begin(self) -> Delta:
        """Return the first delta; an attempt without one is closed. Raises CausewayError."""
        began_at, first = self._clock(), None
        try:
            first = await anext(self.deltas, None)
            if first is None:
                raise CloudFailed("the endpoint's answer ended before its first token", phase="first_token")
        except CausewayError as error:
            self.failed(error)
            raise
        finally:
            if first is None:
                await self.close()
        now = self._clock()
        self._lease.first_token(now - began_at)
        self._latency.first_token(self.endpoint, now - began_at, now)
        if self._trace is not None:
            self._trace.first_token()
        return first

    def succeeded(self) -> None:
        """Report that the whole answer came."""
        self._lease.succeeded()
        if self._trace is not None:
            self._trace.end()

    async def close(self) -> None:
        """Cancel the call if it still runs, and give the lease back."""
        try:
            await self.deltas.aclose()
        finally:
            self._lease.close()
            if self._trace is not None:
                self._trace.end(ClientGone.code)  # No effect on a trace that has already ended.

    def failed(self, error: CausewayError) -> None:
        """Report how the answer broke."""
        self._lease.failed(error)
        if self._trace is not None:
            self._trace.end(error.code)
