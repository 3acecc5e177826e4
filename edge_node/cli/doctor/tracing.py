"""Check that the collector takes traces: an empty export, whose answer the exporter itself would not show."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from router.serving.config import TracingConfig

from .finding import Finding, ok, warn


def check_tracing(config: TracingConfig) -> Iterator[Finding]:
    """Send an empty export. Nothing where no traces are sent."""
    if not config.endpoint:
        return
    from router.serving.otel_check import send_empty_export  # on demand: OpenTelemetry costs a tenth of a second

    fault = asyncio.run(send_empty_export(config.endpoint))
    if fault:
        yield warn("tracing", f"the collector at {config.endpoint} takes no traces", fault)
    else:
        yield ok("tracing", f"the collector at {config.endpoint} took an empty export")
