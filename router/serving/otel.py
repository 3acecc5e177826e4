"""Traces to an OpenTelemetry collector: their export, and whether the collector takes them.

Importing this module loads OpenTelemetry (0.1 s and several megabytes): import it lazily, or for type checking only.
"""

from __future__ import annotations

import os
import ssl
import threading

import aiohttp
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.re import parse_env_headers

from ..telemetry import export_fault
from .config import TracingConfig

_ANSWER_S = 5.0
_FLUSH_S = 2.0
_PROPAGATOR = TraceContextTextMapPropagator()


class SpanExport:
    """Exports to `config.endpoint`; headers and certificates come from the ``OTEL_EXPORTER_OTLP_*`` variables.

    Args:
        service: the name of the service.
        scope: the name of its tracer.
        ids: makes the ids of spans; None: at random.
    """

    def __init__(self, config: TracingConfig, service: str, scope: str, ids: IdGenerator | None = None) -> None:
        self._provider = TracerProvider(
            sampler=ParentBasedTraceIdRatio(config.sample_ratio),
            resource=Resource.create({"service.name": service}),
            id_generator=ids,
            shutdown_on_exit=False,
        )
        self._exporter = OTLPSpanExporter(endpoint=f"{config.endpoint.rstrip('/')}/v1/traces")
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self.tracer: trace.Tracer = self._provider.get_tracer(scope)

    def flush(self) -> None:
        """Export every span that has ended. Blocks until the collector has them."""
        self._provider.force_flush()

    def close(self) -> None:
        """Export the remaining spans. Blocks, for a few seconds at most when the collector is unreachable."""
        # The provider waits for its exporter, and the exporter retries until it is shut down.
        timer = threading.Timer(_FLUSH_S, self._exporter.shutdown)
        timer.start()
        self._provider.shutdown()
        timer.cancel()


def context_of(traceparent: str) -> Context:
    """Return the parent that a `traceparent` header names; "": there is none."""
    return _PROPAGATOR.extract({"traceparent": traceparent}) if traceparent else Context()


def traceparent_of(trace_id: int, span_id: int, flags: int) -> str:
    """Return the `traceparent` header that names a span as the parent."""
    return f"00-{trace_id:032x}-{span_id:016x}-{flags:02x}"


async def send_empty_export(endpoint: str) -> str:
    """Send an export without spans. Returns why the collector did not take it, and what to do; "" if it did.

    Headers and certificates are those of the exporter's variables.
    """
    headers = {"content-type": "application/x-protobuf"}
    headers |= parse_env_headers(_variable("HEADERS"), liberal=True)
    try:
        tls = ssl.create_default_context(cafile=_variable("CERTIFICATE") or None)
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
        async with (
            aiohttp.ClientSession(timeout=timeout, trust_env=True) as session,
            session.post(
                f"{endpoint.rstrip('/')}/v1/traces", data=b"", headers=headers, allow_redirects=False, ssl=tls
            ) as answer,
        ):
            return export_fault(answer.status, answer.headers.get("location", ""))
    except TimeoutError:
        return f"it does not answer within {_ANSWER_S:g} s."
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return f"it cannot be reached: {error}."


def _variable(name: str) -> str:
    return os.environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or os.environ.get(f"OTEL_EXPORTER_OTLP_{name}", "")
