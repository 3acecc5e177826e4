"""What the gateway needs of tracing: without a collector nothing of OpenTelemetry is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

from router.types import Request, Usage

OUTCOME = "causeway.outcome"
"""Attribute of a step that can end well in more ways than one."""
CacheStep = Literal["lookup", "follow", "keep"]


class Step(Protocol):
    """One thing done for a request or a job."""

    @property
    def traceparent(self) -> str:
        """For whoever hangs spans of their own on it: Triton, a worker."""
        ...

    def end(self, error: str = "", said: Mapping[str, str | int] | None = None) -> None:
        """`error`: the code of router.errors; `said`: attributes. Once; what comes later is ignored."""
        ...


class CallTrace(Step, Protocol):
    """A call to one endpoint."""

    def first_token(self) -> None: ...


class Trace(Protocol):
    """One request, or one run of a job."""

    def call(self, model: str, endpoint: str) -> CallTrace: ...

    def cache(self, step: CacheStep) -> Step:
        """Something asked of the shared cache."""
        ...

    def joined(self, other: Trace) -> None:
        """The work of that request answers this one, too."""
        ...

    def admitted(self) -> None:
        """It has its place: until now it waited."""
        ...

    def end(self, *, tier: str, outcome: str, usage: Usage, headers: Mapping[str, str]) -> None:
        """`outcome`: "ok" or an error's code; `headers`: what the answer said about itself."""
        ...


class JobTrace(Protocol):
    """What becomes of jobs between accepted and run; `traceparent` is that of the job's `send`."""

    def send(self, job: str, queue: str, traceparent: str) -> Step:
        """It is being accepted. `traceparent`: the caller's, "" for none."""
        ...

    def received(self, job: str, queue: str, traceparent: str, began: float) -> None:
        """A claim brought it. `began`: Unix s, when the claim did."""
        ...

    def process(self, request: Request, job: str, queue: str, traceparent: str, attempt: int) -> Trace:
        """It is run, for the `attempt`-th time."""
        ...

    def deliver(self, job: str, host: str, traceparent: str, tried: int) -> Step:
        """Its webhook is told, after `tried` times."""
        ...


class Tracing(Protocol):
    @property
    def jobs(self) -> JobTrace: ...

    def begin(self, request: Request, id: str, traceparent: str) -> Trace:  # noqa: A002 -- of the request
        """`traceparent`: the caller's, "" for none."""
        ...

    def close(self) -> None:
        """Blocks until what is left is sent, a few seconds at most where nobody takes it."""
        ...
