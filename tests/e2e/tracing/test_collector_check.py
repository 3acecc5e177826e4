"""`doctor` sends an empty export to real collectors on sockets: edge and gateway say what came back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from causeway_server.cloud_pool.cli.doctor import doctor, examine
from causeway_server.cloud_pool.config import Config
from causeway_server.edge_node.cli.doctor.network import check_tracing
from causeway_server.router.config import TracingConfig
from tests.ports import free_port
from tests.redis_server import RedisServer


class Collector(BaseHTTPRequestHandler):
    """Answers with the server's status; a GET, as a followed redirect sends, with 200."""

    seen: list[tuple[str, str, bytes]]
    status = 200

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.seen.append((self.path, self.headers.get("content-type", ""), body))
        self.send_response(self.status)
        if 300 <= self.status < 400:
            self.send_header("location", "/elsewhere")
        self.send_header("content-length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@contextmanager
def collecting(status: int) -> Iterator[tuple[str, list[tuple[str, str, bytes]]]]:
    seen: list[tuple[str, str, bytes]] = []
    handler = type("Answering", (Collector,), {"seen": seen, "status": status})
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


async def gateway_finding(endpoint: str) -> tuple[str, str]:
    (found,) = await examine(Config(tracing=TracingConfig(endpoint=endpoint)))
    return found.level, found.advice


def edge_finding(endpoint: str) -> tuple[str, str]:
    (found,) = check_tracing(TracingConfig(endpoint=endpoint))
    return found.level, found.advice


@pytest.mark.parametrize(
    ("status", "advice"),
    [(200, ""), (307, "/elsewhere"), (302, "lose every span"), (404, "HTTP 404"), (401, "OTEL_EXPORTER_OTLP_HEADERS")],
)
def test_edge_and_gateway_say_what_came_back(status: int, advice: str) -> None:
    with collecting(status) as (endpoint, seen):
        for level, found in (edge_finding(endpoint), asyncio.run(gateway_finding(endpoint))):
            assert (level == "ok") is (status == 200)
            assert advice in found
        assert seen == [("/v1/traces", "application/x-protobuf", b"")] * 2


def test_a_collector_that_is_away_is_named() -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    for level, found in (edge_finding(endpoint), asyncio.run(gateway_finding(endpoint))):
        assert level != "ok"
        assert "cannot be reached" in found


def test_without_a_collector_nothing_is_checked() -> None:
    assert list(check_tracing(TracingConfig())) == []


@pytest.mark.redis
def test_the_command_fails_where_redis_evicts(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, "--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
    try:
        result = CliRunner().invoke(doctor, ["--redis", server.url])
        assert result.exit_code == 1
        assert "fail  redis" in result.output
        assert "allkeys-lru" in result.output
        with server.client() as client:
            client.config_set("maxmemory-policy", "noeviction")
        result = CliRunner().invoke(doctor, ["--redis", server.url])
        assert (result.exit_code, result.output) == (0, "ok    redis\nok    jobs\n")
    finally:
        server.kill()
