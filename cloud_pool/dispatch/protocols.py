"""What dispatch needs of a pool and of its counters. `pool.Pool` and `metrics` provide these shapes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Sized
from typing import Protocol

from router.errors import CausewayError

from ..upstreams.triton.tensors import Delta, InferenceRequest


class InferenceBackend(Protocol):
    """An upstream server: `upstreams.triton.client.TritonClient`."""

    def generate(self, request: InferenceRequest, /) -> AsyncGenerator[Delta, None]: ...


class EndpointLease(Protocol):
    """One call on one endpoint, outstanding until it is closed. Closed without a report, it counts as abandoned."""

    @property
    def endpoint(self) -> str: ...

    @property
    def triton(self) -> InferenceBackend: ...

    def first_token(self, seconds: float) -> None: ...

    def succeeded(self) -> None: ...

    def failed(self, error: CausewayError) -> None: ...

    def close(self) -> None: ...


class EndpointSource(Protocol):
    @property
    def endpoints(self) -> Sized: ...

    def lease(self, *, key: bytes = b"", excluding: Collection[str] = (), tokens: int = 0) -> EndpointLease:
        """Select an endpoint for a prompt of about so many tokens. Raises CausewayError when none can take it."""
        ...


class DispatchCounters(Protocol):
    def retried(self, code: str) -> None:
        """Count a retry that follows an error with this code."""
