"""What the daemon needs of tracing: without a collector nothing of OpenTelemetry is loaded."""

from __future__ import annotations

from typing import Protocol

from router.types import DecisionRecord, Request


class RequestTrace(Protocol):
    """One request's spans (`tracing.Trace`)."""

    def attempt(self, number: int) -> str:
        """The `traceparent` that attempt `number` (0 is the first) hands on."""
        ...

    def end(self, record: DecisionRecord, *, shared: RequestTrace | None = None) -> None:
        """`shared`: the trace of the request whose work answered this one, too."""
        ...


class RequestTracer(Protocol):
    def begin(self, request: Request, traceparent: str, now: float) -> RequestTrace:
        """`now`: Unix s, when it arrived. `traceparent`: the caller's, "" for none."""
        ...

    def close(self) -> None:
        """Blocks until what is left is sent, a few seconds at most where nobody takes it."""
        ...
