"""A daemon over TLS: its certificate names the client, over HTTP and in live sessions."""

from __future__ import annotations

import ssl
from pathlib import Path

import aiohttp
import msgspec
import pytest
from anyio import to_thread

from causeway_sdk import AsyncCauseway, CausewayError
from causeway_server.edge_node.cli.doctor import network
from causeway_server.edge_node.config.schema import Config, ServerConfig
from causeway_server.router.config import ListenerTls
from causeway_server.router.errors import ConfigError
from tests.certificates import Authority

from ..device import POLICY, running


def _server(ca: Authority, **more: object) -> ServerConfig:
    own = ca.issue("server")
    return ServerConfig(port=0, tls=ListenerTls(str(own.cert), str(own.key), str(ca.file)), **more)  # type: ignore[arg-type]


async def test_a_certificate_names_the_client(tmp_path: Path) -> None:
    """Also over the network without keys: each client has a certificate."""
    ca = Authority(tmp_path / "ca")
    device = ca.issue("kiosk-17")
    context = ssl.create_default_context(cafile=str(ca.file))
    context.load_cert_chain(device.cert, device.key)
    server = _server(ca, host="0.0.0.0")
    Config(server=server).check_clients()
    policy = POLICY.replace('"cloud" in request.tags', 'request.client == "kiosk-17"')
    async with running(tmp_path / "device", policy=policy, server=server) as daemon, aiohttp.ClientSession() as session:
        body = {"model": "auto", "messages": [{"role": "user", "content": "hi"}]}
        url = f"https://127.0.0.1:{daemon.app.port}"
        async with session.post(f"{url}/v1/chat/completions", json=body, ssl=context) as answer:
            assert (answer.status, answer.headers["x-causeway-target"]) == (200, "large")
        async with session.ws_connect(f"{url}/v1/realtime?model=auto", ssl=context) as live:
            assert (await live.receive_json())["type"] == "session.created"
        with pytest.raises(aiohttp.ClientConnectionError):
            await session.get(f"{url}/healthz", ssl=ssl.create_default_context(cafile=str(ca.file)))


async def test_the_sdk_presents_a_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's own commands use it, too; both files are named in the environment."""
    ca = Authority(tmp_path / "ca")
    device = ca.issue("kiosk-17")
    both = tmp_path / "both.pem"
    both.write_bytes(device.cert.read_bytes() + device.key.read_bytes())
    monkeypatch.setenv("CAUSEWAY_CA_FILE", str(ca.file))
    async with running(tmp_path / "device", server=_server(ca)) as daemon:
        url = f"https://127.0.0.1:{daemon.app.port}"
        async with AsyncCauseway(url) as without:
            with pytest.raises(CausewayError):
                await without.models()
        monkeypatch.setenv("CAUSEWAY_CLIENT_CERT_FILE", str(both))
        async with AsyncCauseway(url) as client:
            assert await client.models()
    monkeypatch.setenv("CAUSEWAY_CA_FILE", str(tmp_path / "none.pem"))
    with pytest.raises(CausewayError, match=r"none\.pem"):
        AsyncCauseway(url)


async def test_an_unusable_certificate_is_refused_at_start(tmp_path: Path) -> None:
    ca = Authority(tmp_path / "ca")
    old = ca.issue("old", begins=-3, ends=-1)
    server = ServerConfig(port=0, tls=ListenerTls(str(old.cert), str(old.key)))
    with pytest.raises(ConfigError, match="expired on"):
        await running(tmp_path / "device", server=server).__aenter__()


async def test_doctor_knows_the_daemon_by_its_certificate(tmp_path: Path) -> None:
    """It may ask for a client's, which doctor has not got; another certificate is another program's."""
    ca = Authority(tmp_path / "ca")
    server = _server(ca)
    other = ca.issue("other")
    async with running(tmp_path / "device", server=server) as daemon:
        there = msgspec.structs.replace(server, port=daemon.app.port or 0)
        assert (await to_thread.run_sync(network.check_port, there)).level == "ok"
        changed = msgspec.structs.replace(there, tls=ListenerTls(str(other.cert), str(other.key)))
        assert (await to_thread.run_sync(network.check_port, changed)).level == "fail"
    assert [finding.level for finding in network.check_tls(server)] == ["ok"]
    bad = msgspec.structs.replace(server, tls=ListenerTls(server.tls.cert_file, str(other.key)))
    assert [finding.level for finding in network.check_tls(bad)] == ["fail"]
