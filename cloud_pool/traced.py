"""What the gateway needs of tracing: without a collector nothing of OpenTelemetry is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from router.types import Request, Usage


class CallTrace(Protocol):
    """A call to one endpoint."""

    @property
    def traceparent(self) -> str:
        """For Triton, which hangs its own spans on it."""
        ...

    def first_token(self) -> None: ...

    def end(self, error: str = "") -> None:
        """`error`: the code of router.errors. Once; what comes later is ignored."""
        ...


class Trace(Protocol):
    """One request."""

    def call(self, model: str, endpoint: str) -> CallTrace: ...

    def admitted(self) -> None:
        """It has its place: until now it waited."""
        ...

    def end(self, *, tier: str, outcome: str, usage: Usage, headers: Mapping[str, str]) -> None:
        """`outcome`: "ok" or an error's code; `headers`: what the answer said about itself."""
        ...


class Tracing(Protocol):
    def begin(self, request: Request, id: str, traceparent: str) -> Trace:  # noqa: A002 -- of the request
        """`traceparent`: the caller's, "" for none."""
        ...

    def close(self) -> None:
        """Blocks until what is left is sent, a few seconds at most where nobody takes it."""
        ...
