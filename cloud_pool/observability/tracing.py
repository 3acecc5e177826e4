"""The tracing interface of the gateway. Without a collector nothing of OpenTelemetry is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

from router.types import Request, Usage

OUTCOME = "causeway.outcome"
"""Attribute of a span that can end well in more than one way."""
CacheOperation = Literal["lookup", "follow", "keep"]


class Span(Protocol):
    """One operation for a request or a job."""

    @property
    def traceparent(self) -> str:
        """Parent for spans that other processes create: Triton, a worker."""
        ...

    def end(self, error: str = "", attributes: Mapping[str, str | int] | None = None) -> None:
        """End the span once; later calls are ignored. `error`: a code of router.errors."""
        ...


class CallTrace(Span, Protocol):
    """A call to one endpoint."""

    def first_token(self) -> None: ...


class Trace(Protocol):
    """One request, or one run of a job."""

    def call(self, model: str, endpoint: str) -> CallTrace: ...

    def cache(self, operation: CacheOperation) -> Span:
        """Start the span of an operation in the shared cache."""
        ...

    def add_link(self, other: Trace) -> None:
        """Link to the request whose generation answers this one too."""
        ...

    def admitted(self) -> None:
        """Record that the request has its permit: until now it waited."""
        ...

    def end(self, *, tier: str, outcome: str, usage: Usage, headers: Mapping[str, str]) -> None:
        """End the trace. `outcome`: "ok" or an error's code; `headers`: the answer's response headers."""
        ...


class JobTrace(Protocol):
    """The life of jobs. `traceparent` is that of the job's `send` span unless stated otherwise."""

    def send(self, job: str, queue: str, traceparent: str) -> Span:
        """Start the span of accepting a job. `traceparent`: the client's, "" for none."""
        ...

    def received(self, job: str, queue: str, traceparent: str, began: float) -> None:
        """Record that a worker claimed the job. `began`: Unix time in seconds at which the claim started."""
        ...

    def process(self, request: Request, job: str, queue: str, traceparent: str, attempt: int) -> Trace:
        """Start the trace of run number `attempt`."""
        ...

    def deliver(self, job: str, host: str, traceparent: str, tried: int) -> Span:
        """Start the span of delivering the job's webhook after `tried` attempts."""
        ...


class Tracing(Protocol):
    @property
    def jobs(self) -> JobTrace: ...

    def begin(self, request: Request, id: str, traceparent: str) -> Trace:  # noqa: A002 -- of the request
        """Start a request's trace. `traceparent`: the client's, "" for none."""
        ...

    def close(self) -> None:
        """Block until the remaining spans are sent; a few seconds at most if the collector is unavailable."""
        ...
