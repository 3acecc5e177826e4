#!/bin/sh
# opentelemetry-exporter-otlp-proto-http 1.45.2 (PyPI): a redirect counts as a successful export, and is not followed.
#
# Guess: the exporter follows a redirect, as earlier releases did through `requests`, or reports that the collector did
# not take the spans.
# Seen: 301, 302, 307 and 308 make `export` return SUCCESS after one POST, to the address that redirects; nothing
# is sent to where it points. A collector that moved behind a sign-in page, or from http to https, loses every trace,
# and neither the log nor the exporter's own result says so.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT INT TERM
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet opentelemetry-exporter-otlp-proto-http==1.45.2 opentelemetry-sdk==1.45.2 requests==2.34.2
"$folder/venv/bin/python" - <<'PYTHON'
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

received = []


class Server(BaseHTTPRequestHandler):
    def answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        received.append((self.command, self.path, len(body) > 0))
        moved = self.path.partition("-")[2]
        self.send_response(int(moved) if moved else 200)
        if moved:
            self.send_header("Location", "/there")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST = answer

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
memory = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(memory))
with provider.get_tracer("finding").start_as_current_span("a span"):
    pass
spans = memory.get_finished_spans()

for status in (301, 302, 307, 308, 400):
    received.clear()
    exporter = OTLPSpanExporter(endpoint=f"http://127.0.0.1:{server.server_port}/here-{status}", timeout=5)
    result = exporter.export(spans)
    print(status, result.name, received)
    assert received == [("POST", f"/here-{status}", True)]
    assert result is (SpanExportResult.FAILURE if status == 400 else SpanExportResult.SUCCESS)
server.shutdown()
PYTHON
