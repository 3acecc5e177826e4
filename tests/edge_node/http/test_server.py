"""Misbehaving clients: an OpenAI error or a closed connection, bounded memory; the next valid request is answered."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from causeway_server.edge_node.config.schema import KeyConfig, ServerConfig
from causeway_server.router.errors import ConfigError
from tests.waiting import until

from ..device import Device, running
from ..scripted import EDGE_WORDS

pytestmark = pytest.mark.slow

BODY = json.dumps({"model": "auto", "messages": [{"role": "user", "content": "hi"}]}).encode()
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
GOOD = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


class Raw:
    """A client that sends exact bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, timeout_s: float = 60.0) -> tuple[int, bytes]:
        """One response's status and body; (0, b"") when the connection was closed instead."""
        try:
            head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), timeout_s)
        except (asyncio.IncompleteReadError, ConnectionError):
            return 0, b""
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
        return int(head.split()[1]), await self.reader.readexactly(int(fields.get(b"content-length", b"0")))

    async def closed(self, timeout_s: float = 60.0) -> bool:
        try:
            return await asyncio.wait_for(self.reader.read(1 << 20), timeout_s) == b""
        except ConnectionError:
            return True


@asynccontextmanager
async def connected(port: int | None) -> AsyncIterator[Raw]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Raw(reader, writer)
    finally:
        writer.close()


def raw(device: Device) -> AbstractAsyncContextManager[Raw]:
    return connected(device.app.port)


def code(body: bytes) -> str:
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["code"])


async def assert_still_well(device: Device) -> None:
    # On a connection of its own: a kept one may be closed for its idleness just as it is used again.
    async with aiohttp.ClientSession(f"http://127.0.0.1:{device.app.port}") as session:
        answer = await Device(device.app, device.engine, device.cloud, session).ask()
    assert answer.status == 200
    assert answer.text == "".join(EDGE_WORDS)
    device.assert_nothing_leaks()


@pytest.mark.parametrize(
    "bad",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 50,
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xff\xfe\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: minus one\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /healthz HTTP/1.1\r\nbad header\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nx-long: " + b"a" * 20_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
    ids=["no http", "tls", "version", "bytes", "length", "smuggling", "chunks", "header", "long header", "long line"],
)
async def test_malformed_http_gets_a_4xx_or_a_closed_connection(device: Device, bad: bytes) -> None:
    async with raw(device) as client:
        await client.send(bad)
        status, body = await client.answer()
        if status:
            assert 400 <= status < 500
            assert code(body)
        assert await client.closed()
    await assert_still_well(device)


async def test_ten_megabytes_of_headers_are_refused_early(device: Device) -> None:
    async with raw(device) as client:
        await client.send(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n")
        sent = 0
        with pytest.raises(ConnectionError):  # noqa: PT012 -- which write notices first is the kernel's business
            for number in range(20_000):
                await client.send(b"x-header-%d: %s\r\n" % (number, b"a" * 500))
                sent += 500
        assert sent < 5_000_000
    await assert_still_well(device)


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
async def test_a_body_that_is_too_large_is_a_413(tmp_path: Path, chunked: bool) -> None:
    """With Content-Length or chunked: as soon as it is known to be too large."""
    async with running(tmp_path, server=ServerConfig(port=0, max_body_bytes=10_000)) as device, raw(device) as client:
        if chunked:
            await client.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
            for _ in range(30):
                await client.send(b"3e8\r\n" + b"a" * 1000 + b"\r\n")
        else:
            await client.send(HEAD + b"Content-Length: 99999999999\r\n\r\n" + b"a" * 1000)
        status, body = await client.answer()
        assert (status, code(body)) == (413, "body_too_large")
        await assert_still_well(device)


async def test_partly_received_bodies_are_bounded_together(tmp_path: Path) -> None:
    limit = 100_000
    async with running(tmp_path, server=ServerConfig(port=0, max_body_bytes=limit, read_timeout_s=60.0)) as device:
        clients = [await asyncio.open_connection("127.0.0.1", device.app.port) for _ in range(12)]
        for _, writer in clients:
            writer.write(HEAD + b"Content-Length: 100000\r\n\r\n" + b" " * 90_000)
        answers = [asyncio.ensure_future(reader.readline()) for reader, _ in clients]
        # One client has half of 8 times the limit. A refusal gives its bytes back, so not many more are refused.
        await until(lambda: sum(answer.done() for answer in answers) >= 8)
        refused = [answer for answer in answers if answer.done()]
        assert len(refused) <= 10
        assert {answer.result().split()[1] for answer in refused} == {b"429"}
        for answer in answers:
            answer.cancel()
        for _, writer in clients:
            writer.close()
        await assert_still_well(device)


@pytest.fixture
async def impatient(tmp_path: Path) -> AsyncIterator[Device]:
    async with running(tmp_path, server=ServerConfig(port=0, read_timeout_s=0.5)) as device:
        yield device


async def test_a_slow_body_is_a_408(impatient: Device) -> None:
    """Other requests are answered meanwhile."""
    async with raw(impatient) as client:
        await client.send(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY))
        await client.send(BODY[:10])
        await assert_still_well(impatient)
        status, body = await client.answer()
        assert (status, code(body)) == (408, "request_timeout")
    await assert_still_well(impatient)


@pytest.mark.parametrize("head", [b"", b"POST /v1/chat/comp", HEAD], ids=["nothing", "a line", "a head"])
async def test_an_incomplete_head_closes_the_connection(impatient: Device, head: bytes) -> None:
    async with raw(impatient) as client:
        await client.send(head)
        assert await client.closed()


async def test_a_client_that_disconnects_in_the_body_leaves_no_record(device: Device) -> None:
    async with raw(device) as client:
        await client.send(HEAD + b"Content-Length: 100\r\n\r\n{")
        await until(lambda: device.app.in_flight == 1)
    await until(lambda: device.app.in_flight == 0)
    assert len(device.parts.decisions.memory) == 0
    await assert_still_well(device)


async def test_pipelined_requests_are_answered_in_order(device: Device) -> None:
    async with raw(device) as client:
        await client.send(
            b"".join(b"GET /v1/models/%d HTTP/1.1\r\nHost: localhost\r\n\r\n" % number for number in range(100))
        )
        for number in range(100):
            status, body = await client.answer()
            assert status == 404
            assert f"`{number}`" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("version", "connection", "stays"),
    [
        ("1.1", "", True),
        ("1.1", "Connection: close\r\n", False),
        ("1.0", "", False),
        ("1.0", "Connection: keep-alive\r\n", True),
    ],
)
async def test_keep_alive_follows_the_http_version_and_the_connection_header(
    device: Device, version: str, connection: str, stays: bool, stream: bool
) -> None:
    body = BODY.replace(b'"auto"', b'"auto", "stream": true') if stream else BODY
    head = (
        f"POST /v1/chat/completions HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n{connection}"
    )
    async with raw(device) as client:
        await client.send(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        answer = await client.reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(f"HTTP/{version} 200 OK\r\n".encode())
        assert b"Server: causeway\r\n" in answer
        if stream and version == "1.0":
            return  # without chunks the end of such a stream is the end of the connection
        end = b"0\r\n\r\n" if stream else b"}}}"
        assert (await client.reader.readuntil(end)).endswith(end)
        if stays:
            await client.send(GOOD)
            while b"HTTP/1.1 200 OK" not in await client.reader.readuntil(b"\r\n"):
                pass
        else:
            assert await client.closed()


async def test_expect_100_continue_is_answered_before_the_body(device: Device) -> None:
    async with raw(device) as client:
        await client.send(HEAD + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(BODY))
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(BODY)
        status, body = await client.answer()
        assert status == 200
        assert json.loads(body)["object"] == "chat.completion"


async def test_compressed_bodies_are_refused_before_decompression(device: Device) -> None:
    bomb = gzip.compress(b" " * 50_000_000)
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    async with device.session.post("/v1/chat/completions", data=bomb, headers=headers) as response:
        assert response.status == 415
        assert code(await response.read()) == "unsupported_media_type"


@pytest.mark.parametrize(
    ("method", "path", "status", "error"),
    [
        ("GET", "/", 404, "not_found"),
        ("GET", "/v1/nothing", 404, "not_found"),
        ("GET", "/v1/decisions/unknown", 404, "not_found"),
        ("GET", "/v1/models/gpt-99", 404, "model_not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/healthz", 405, "method_not_allowed"),
        ("GET", "/v1/decisions?colour=red", 400, "invalid_value"),
        ("GET", "/v1/decisions?limit=0", 400, "invalid_value"),
        ("GET", "/v1/decisions?since=yesterday", 400, "invalid_value"),
    ],
)
async def test_wrong_paths_and_methods_are_openai_errors(
    device: Device, method: str, path: str, status: int, error: str
) -> None:
    async with device.session.request(method, path) as response:
        assert response.status == status
        assert response.content_type == "application/json"
        assert code(await response.read()) == error


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"[1, 2]", None),
        (b"{", None),
        (b'{"model": "auto"}', "messages"),
        (b'{"model": 7, "messages": []}', "model"),
        (b'{"model": "auto", "messages": [{"role": "user", "content": "\xff\xfe"}]}', None),
        (b"[" * 100_000, None),
        (b'{"model": "auto", "messages": [{"role": "user", "content": "hi"}], "temperature": "hot"}', "temperature"),
    ],
    ids=["empty", "array", "cut", "missing", "type", "utf-8", "deep", "temperature"],
)
async def test_bad_bodies_are_400_with_the_keys_path(device: Device, body: bytes, param: str | None) -> None:
    headers = {"Content-Type": "application/json"}
    async with device.session.post("/v1/chat/completions", data=body, headers=headers) as response:
        assert response.status == 400
        error = (await response.json())["error"]
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"
    await assert_still_well(device)


@pytest.mark.parametrize(
    "headers",
    [
        {"x-causeway-prefer": "cloud"},
        {"x-causeway-deadline-ms": "soon"},
        {"x-causeway-deadline-ms": "0"},
        {"x-causeway-deadline-ms": "-5"},
        {"x-causeway-tags": "a" * 65},
        {"x-causeway-tags": ",".join(map(str, range(33)))},
    ],
    ids=lambda headers: next(iter(headers.items()))[1][:12],
)
async def test_an_invalid_routing_header_is_a_400(device: Device, headers: dict[str, str]) -> None:
    """It may be meant to protect privacy, so it is not ignored."""
    answer = await device.ask(headers=headers)
    assert answer.status == 400
    assert device.engine.calls == []


@pytest.mark.parametrize(
    ("header", "meant"), [("x-causeway-tag", "x-causeway-tags"), ("X-Causeway-Dedline-Ms", "x-causeway-deadline-ms")]
)
async def test_a_misspelt_routing_header_is_a_400_that_names_the_right_one(
    device: Device, header: str, meant: str
) -> None:
    """Also after the same body was answered: nothing is remembered that would let it pass."""
    assert (await device.ask()).status == 200
    answer = await device.ask(headers={header: "private"})
    assert (answer.status, answer.code) == (400, "unknown_parameter")
    assert f"did you mean `{meant}`?" in answer.message
    assert (await device.ask(headers={"x-causeway-experiment": "1"})).status == 200


async def test_the_wrong_media_type_is_a_415(device: Device) -> None:
    """The message names the right one."""
    async with device.session.post("/v1/chat/completions", data={"model": "auto"}) as response:
        assert response.status == 415
        assert "application/json" in (await response.json())["error"]["message"]


class TestKeys:
    """API keys, where some are configured."""

    @pytest.fixture
    async def guarded(self, tmp_path: Path) -> AsyncIterator[Device]:
        key = KeyConfig("till-7", hashlib.sha256(b"s3cret").hexdigest(), ("private",))
        async with running(tmp_path, server=ServerConfig(port=0, keys=(key,))) as device:
            yield device

    @pytest.mark.parametrize("value", [None, "Bearer", "Bearer wrong", "Basic s3cret", "s3cret", "Bearer \u00e9"])
    async def test_a_missing_or_wrong_key_is_a_401(self, guarded: Device, value: str | None) -> None:
        headers = {"Authorization": value} if value else {}
        for method, path in (("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/v1/decisions")):
            async with guarded.session.request(method, path, headers=headers, json={}) as response:
                assert response.status == 401
                assert response.headers["WWW-Authenticate"] == "Bearer"
                assert code(await response.read()) == "invalid_api_key"
        assert guarded.engine.calls == []

    async def test_a_key_names_the_client_and_adds_its_tags(self, guarded: Device) -> None:
        answer = await guarded.ask(headers={"Authorization": "Bearer s3cret"})
        assert answer.status == 200
        record = guarded.newest()
        assert (record.request.client, record.request.tags) == ("till-7", ("private",))
        assert record.decision is not None
        assert record.decision.private

    @pytest.mark.parametrize("path", ["/healthz", "/health", "/readyz", "/metrics"])
    async def test_health_needs_no_key(self, guarded: Device, path: str) -> None:
        assert (await guarded.get(path)).status == 200


class TestUnixSocket:
    """The socket file beside TCP."""

    async def test_it_answers_like_tcp_and_is_removed_on_close(self, tmp_path: Path) -> None:
        path = tmp_path / "edge.sock"
        async with running(tmp_path, server=ServerConfig(port=0, socket=str(path))) as device:
            assert path.stat().st_mode & 0o777 == 0o660
            async with (
                aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as session,
                session.post("http://edge/v1/chat/completions", data=BODY, headers=JSON) as response,
            ):
                assert response.status == 200
            assert device.newest().request.client == "unix"
        assert not path.exists()

    async def test_a_dead_daemons_socket_is_replaced(self, tmp_path: Path) -> None:
        path = tmp_path / "edge.sock"
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
        async with running(tmp_path, server=ServerConfig(port=0, socket=str(path))):
            pass

    async def test_a_running_daemons_socket_is_not_replaced(self, tmp_path: Path) -> None:
        path = tmp_path / "edge.sock"
        async with running(tmp_path / "1", server=ServerConfig(port=0, socket=str(path))) as first:
            with pytest.raises(ConfigError, match="another program listens"):
                async with running(tmp_path / "2", server=ServerConfig(port=0, socket=str(path))):
                    pass
            await assert_still_well(first)


async def test_a_port_in_use_is_a_clear_error(tmp_path: Path) -> None:
    async with running(tmp_path / "1") as device:
        assert device.app.port is not None
        with pytest.raises(ConfigError, match="another program listens"):
            async with running(tmp_path / "2", server=ServerConfig(port=device.app.port)):
                pass


async def test_a_client_that_reads_nothing_is_dropped_at_the_deadline(tmp_path: Path) -> None:
    async with running(tmp_path) as device:
        device.engine.flood = True
        async with raw(device) as client:
            body = BODY.replace(b'"auto"', b'"small", "stream": true')
            head = HEAD + b"x-causeway-deadline-ms: 1500\r\nContent-Length: %d\r\n\r\n" % len(body)
            await client.send(head + body)
            await until(lambda: device.engine.running == 1)
            await until(lambda: device.engine.running == 0)
        await until(lambda: len(device.parts.decisions.memory) == 1)
        assert device.newest().outcome.status in ("error", "cancelled")
        device.engine.flood = False
        await assert_still_well(device)


JSON = {"Content-Type": "application/json"}
