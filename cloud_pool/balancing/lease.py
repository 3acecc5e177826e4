"""One call's place on one endpoint."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from router.errors import CausewayError

from ..upstreams.triton.client import TritonClient


class LeaseObserver(Protocol):
    """Who is told what became of a lease: its pool."""

    def on_first_token(self, lease: Lease, seconds: float) -> None: ...
    def on_success(self, lease: Lease) -> None: ...
    def on_error(self, lease: Lease, error: CausewayError) -> None: ...
    def on_close(self, lease: Lease) -> None: ...
    def is_slow(self, lease: Lease) -> bool: ...


class Lease:
    """Counts as outstanding until it is closed: use it as a context manager.

    Say `first_token` when it came, and then at most one of `succeeded` and `failed`; a caller who leaves says neither.
    """

    def __init__(self, ear: LeaseObserver, endpoint: str, triton: TritonClient, now: float) -> None:
        self.endpoint = endpoint
        self.triton = triton
        self.began_at = now
        self.heard = False  # the first token came
        self.told = False  # how it ended
        self._ear = ear
        self._closed = False

    @property
    def is_slow(self) -> bool:
        """Whether its endpoint is, by what is known now."""
        return self._ear.is_slow(self)

    def first_token(self, seconds: float) -> None:
        """`seconds` from the start of the call on this endpoint."""
        if not (self.heard or self._closed):
            self.heard = True
            self._ear.on_first_token(self, seconds)

    def succeeded(self) -> None:
        """The whole answer came."""
        if not (self.told or self._closed):
            self.told = True
            self._ear.on_success(self)

    def failed(self, error: CausewayError) -> None:
        """Any error of the call; which of them are the endpoint's fault is for the pool to say."""
        if not (self.told or self._closed):
            self.told = True
            self._ear.on_error(self, error)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._ear.on_close(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
