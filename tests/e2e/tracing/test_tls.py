"""Spans go to a collector over TLS, with certificates of both sides, and to no server that cannot be verified."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from causeway_server.router.config import TracingConfig
from causeway_server.router.serving.otel import SpanExport, send_empty_export
from tests.certificates import Authority

from .collector import Collector

FAULTS = ("", "foreign server", "expired server", "plain server", "foreign client")


@pytest.mark.parametrize("fault", FAULTS)
async def test_spans_go_to_a_verified_collector_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """`doctor` finds the same."""
    ca, other = Authority(tmp_path / "ca"), Authority(tmp_path / "other", "other")
    own = ca.issue("collector", begins=-3, ends=-1) if fault == "expired server" else ca.issue("collector")
    client = (other if fault == "foreign client" else ca).issue("device")
    monkeypatch.delenv("REQUESTS_CA_BUNDLE", raising=False)  # the exporter's client reads it first
    monkeypatch.delenv("CURL_CA_BUNDLE", raising=False)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str((other if fault == "foreign server" else ca).file))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", str(client.cert))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CLIENT_KEY", str(client.key))
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(ca.file))
    tls.load_cert_chain(own.cert, own.key)
    tls.verify_mode = ssl.CERT_REQUIRED
    collector = await Collector().start(None if fault == "plain server" else tls)
    endpoint = collector.url.replace("http://", "https://")
    export = SpanExport(TracingConfig(endpoint=endpoint), "edge", "test")
    export.tracer.start_span("one").end()
    await asyncio.to_thread(export.close)
    assert [span.name for span in collector.spans] == ([] if fault else ["one"])
    found = await send_empty_export(endpoint)
    assert ("cannot be reached" in found) == bool(fault)
    await collector.stop()
