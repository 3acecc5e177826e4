"""Whether a collector takes traces: an empty export, whose answer the exporter itself would not show."""

from __future__ import annotations

import os
import ssl

import aiohttp
from opentelemetry.util.re import parse_env_headers

from ..telemetry import export_fault

_ANSWER_S = 5.0


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
