"""The span of what is being accepted, and the context that travels with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from router.errors import CausewayError

from ...observability.tracing import JobTrace


@contextmanager
def enqueue_span(trace: JobTrace | None, job: str, queue: str, traceparent: str) -> Iterator[str]:
    """What the job's later spans hang on: this one, or where nobody traces here, the caller's `traceparent`."""
    if trace is None:
        yield traceparent
        return
    step = trace.send(job, queue, traceparent)
    try:
        yield step.traceparent
    except CausewayError as error:
        step.end(error.code)
        raise
    finally:
        step.end()
