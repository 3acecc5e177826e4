"""Every listener over TLS, as `openssl s_client` meets it: whom it answers, and whom it refuses with which alert."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import anyio
import pytest

from causeway_server.cloud_pool.app import App, build
from causeway_server.cloud_pool.config import Config
from causeway_server.cloud_pool.http.config import GrpcConfig, OperatorConfig
from causeway_server.cloud_pool.http.config import ServerConfig as GatewayServer
from causeway_server.cloud_pool.upstreams.config import UpstreamConfig
from causeway_server.edge_node.config.schema import ServerConfig as EdgeServer
from causeway_server.router.config import ListenerTls
from tests.certificates import Authority, Issued
from tests.cloud_pool.upstreams.http_gateway import http_tier
from tests.cloud_pool.upstreams.http_gateway import serving as http_gateway
from tests.edge_node.device import running
from tests.edge_node.scripted import ScriptedCloud
from tests.fleet.server.conftest import fleet_folder, serving

__all__ = ["fleet_folder"]
GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
SETTINGS = bytes.fromhex("000000040000000000")
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SETTINGS + b"\xff" * 9  # no frame: the server ends the connection
Start = Callable[[Path, Path, ListenerTls], AbstractAsyncContextManager[int]]


@asynccontextmanager
async def edge(folder: Path, _: Path, tls: ListenerTls) -> AsyncIterator[int]:
    async with running(folder / "device", server=EdgeServer(port=0, tls=tls)) as device:
        assert device.app.port is not None
        yield device.app.port


def gateway(port_of: Callable[[App], int]) -> Start:
    @asynccontextmanager
    async def start(folder: Path, _: Path, tls: ListenerTls) -> AsyncIterator[int]:
        config = Config(
            server=GatewayServer(port=0, tls=tls),
            operator=OperatorConfig(port=0, tls=tls),
            grpc=GrpcConfig(port=0),
            tiers=(http_tier("http://127.0.0.1:1"),),
            state_dir=str(folder / "gateway"),
        )
        async with anyio.create_task_group() as tasks:
            app = build(config, tasks)
            await app.start()
            yield port_of(app)
            await app.stop()
        await app.close()

    return start


@asynccontextmanager
async def control_plane(_: Path, fleet: Path, tls: ListenerTls) -> AsyncIterator[int]:
    async with serving(fleet, "", tls=tls) as plane:
        yield _port(plane.url)


def _port(url: str) -> int:
    return int(url.rpartition(":")[2].partition("/")[0])


LISTENERS: dict[str, Start] = {
    "edge": edge,
    "gateway": gateway(lambda app: _port(app.url)),
    "gRPC": gateway(lambda app: 0 if app.grpc is None else app.grpc.port),
    "operators": gateway(lambda app: _port(app.operator_url)),
    "control plane": control_plane,
}


async def s_client(port: int, sent: bytes, *options: str) -> bytes:
    process = await asyncio.create_subprocess_exec(
        *("openssl", "s_client", "-ign_eof", "-connect", f"127.0.0.1:{port}", *options),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    printed, _ = await process.communicate(sent)
    return printed


@pytest.mark.parametrize("name", LISTENERS)
async def test_a_listener_answers_its_clients_alone(tmp_path: Path, fleet_folder: Path, name: str) -> None:
    ca, foreign = Authority(tmp_path / "ca"), Authority(tmp_path / "other", "other")
    own, client = ca.issue("server"), ca.issue("kiosk")
    refused: dict[str, tuple[tuple[str, ...], bytes]] = {
        "no certificate": ((), b"certificate required"),
        "expired": (_of(ca.issue("late", begins=-3, ends=-1)), b"certificate expired"),
        "foreign": (_of(foreign.issue("foreign")), b"unknown ca"),
        "TLS 1.1": ((*_of(client), "-tls1_1", "-cipher", "ALL:@SECLEVEL=0"), b"alert protocol version"),
    }
    asks, answer = (HTTP2, SETTINGS[3:]) if name == "gRPC" else (GET, b"HTTP/1.1 ")
    alpn = ("-alpn", "h2") if name == "gRPC" else ()
    async with LISTENERS[name](tmp_path, fleet_folder, ListenerTls(str(own.cert), str(own.key), str(ca.file))) as port:
        for options, alert in refused.values():
            printed = await s_client(port, asks, *alpn, "-CAfile", str(ca.file), *options)
            assert alert in printed.lower()
            assert answer not in printed
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(asks)
        assert answer not in await reader.read()
        writer.close()
        usual = (*alpn, "-CAfile", str(ca.file), "-verify_return_error", *_of(client))
        printed = await s_client(port, asks, *usual)
        assert answer in printed
        renewed = ca.issue("server")  # the same files
        assert _body(renewed) not in printed
        while _body(renewed) not in (printed := await s_client(port, asks, *usual)):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        assert answer in printed


@pytest.mark.parametrize("fault", ["", "foreign server", "no certificate"])
async def test_a_gateway_and_its_upstream_check_each_other(tmp_path: Path, fault: str) -> None:
    ca, other = Authority(tmp_path / "ca"), Authority(tmp_path / "other", "other")
    own, client = ca.issue("server"), ca.issue("gateway")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(ca.file))
    tls.load_cert_chain(own.cert, own.key)
    tls.verify_mode = ssl.CERT_REQUIRED
    cloud = ScriptedCloud()
    cloud.tls = tls
    await cloud.start()
    upstream = UpstreamConfig(
        kind="openai",
        urls=(cloud.url,),
        verify_features=False,
        ca_file=str((other if fault == "foreign server" else ca).file),
        client_cert_file="" if fault == "no certificate" else str(client.cert),
        client_key_file="" if fault == "no certificate" else str(client.key),
    )
    async with http_gateway(tmp_path, http_tier(cloud.url, upstream=upstream)) as served:
        answer = await served.ask()
    assert (answer.status == 200, len(cloud.bodies)) == ((True, 1) if not fault else (False, 0)), answer.body
    await cloud.stop()


def _of(issued: Issued) -> tuple[str, ...]:
    return ("-cert", str(issued.cert), "-key", str(issued.key))


def _body(issued: Issued) -> bytes:
    """The certificate as `s_client` prints it."""
    return issued.cert.read_bytes().splitlines()[1]
