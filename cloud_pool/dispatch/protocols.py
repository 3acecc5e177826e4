"""What dispatch needs of a pool and of whoever counts. `pool.Pool` and `metrics.TierCounts` have these shapes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Sized
from typing import Literal, Protocol

from router.errors import CausewayError

from ..upstreams.triton.tensors import Delta, InferenceRequest

HedgeOutcome = Literal["won", "lost", "failed", "refused", "cancelled"]


class InferenceBackend(Protocol):
    """A Triton: `triton.Triton`."""

    def generate(self, ask: InferenceRequest) -> AsyncGenerator[Delta, None]: ...


class EndpointLease(Protocol):
    """A go at one endpoint, outstanding until it is closed. If nothing is said of it, it was given up."""

    @property
    def endpoint(self) -> str: ...

    @property
    def triton(self) -> InferenceBackend: ...

    @property
    def is_slow(self) -> bool:
        """Whether its endpoint is much slower than others, by what is known now."""
        ...

    def first_token(self, seconds: float) -> None: ...

    def succeeded(self) -> None: ...

    def failed(self, error: CausewayError) -> None: ...

    def close(self) -> None: ...


class EndpointSource(Protocol):
    @property
    def healthy(self) -> int:
        """Endpoints that take asks."""
        ...

    @property
    def endpoints(self) -> Sized: ...

    def lease(self, *, key: bytes = b"", excluding: Collection[str] = ()) -> EndpointLease:
        """Raises CausewayError when nobody can take it."""
        ...


class DispatchCounters(Protocol):
    def retried(self, code: str) -> None:
        """Another try follows an error with this code."""

    def hedged(self, outcome: HedgeOutcome) -> None:
        """won, lost: whether the hedge's delta came first; failed: none came; cancelled: the caller left before;
        refused: a hedge was wanted, but the share is used up."""


class NoCounters:
    """Counts nothing."""

    def retried(self, code: str) -> None: ...

    def hedged(self, outcome: HedgeOutcome) -> None: ...
