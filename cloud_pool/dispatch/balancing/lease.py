"""One call on one endpoint."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from router.errors import CausewayError

from ...upstreams.triton.client import TritonClient


class LeaseListener(Protocol):
    """Learns what becomes of a lease: `pool.Pool`."""

    def on_first_token(self, lease: Lease, seconds: float) -> None: ...

    def on_success(self, lease: Lease) -> None: ...

    def on_error(self, lease: Lease, error: CausewayError) -> None: ...

    def on_close(self, lease: Lease) -> None: ...


class Lease:
    """The right to one call on one endpoint, outstanding until it is closed: use it as a context manager.

    Report `first_token` when it comes, and then at most one of `succeeded` and `failed`. A caller that leaves reports
    neither. Later reports of the same kind are ignored.
    """

    def __init__(
        self, listener: LeaseListener, endpoint: str, triton: TritonClient, now: float, tokens: int = 0
    ) -> None:
        """`tokens`: of the prompt, estimated."""
        self.endpoint = endpoint
        self.triton = triton
        self.began_at = now
        self.tokens = tokens
        self.has_first_token = False
        self.has_outcome = False
        self._listener = listener
        self._closed = False

    def first_token(self, seconds: float) -> None:
        """Report the first token, `seconds` after the call started on this endpoint."""
        if not (self.has_first_token or self._closed):
            self.has_first_token = True
            self._listener.on_first_token(self, seconds)

    def succeeded(self) -> None:
        """Report that the whole answer came."""
        if not (self.has_outcome or self._closed):
            self.has_outcome = True
            self._listener.on_success(self)

    def failed(self, error: CausewayError) -> None:
        """Report any error of the call; the pool decides whether it counts against the endpoint."""
        if not (self.has_outcome or self._closed):
            self.has_outcome = True
            self._listener.on_error(self, error)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._listener.on_close(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
