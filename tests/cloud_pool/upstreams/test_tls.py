"""TLS to a Triton's gRPC port, in whose place is a server of gRPC's library: mTLS, and servers that are refused."""

from __future__ import annotations

from pathlib import Path

import anyio
import grpc
import pytest
from grpc import aio

from causeway_server.cloud_pool.upstreams.clients import UpstreamClients
from causeway_server.cloud_pool.upstreams.config import UpstreamConfig
from causeway_server.cloud_pool.upstreams.triton.connection import ConnectFailed, TritonConnection
from causeway_server.router.errors import ConfigError
from causeway_server.router.serving.tls.contexts import HTTP2, TlsFiles, client_tls
from tests.certificates import Authority


async def _echo(request: bytes, call: object) -> bytes:
    return request


@pytest.mark.parametrize("fault", ["", "other name", "foreign", "no certificate"])
async def test_calls_over_tls(tmp_path: Path, fault: str) -> None:
    ca = Authority(tmp_path / "ca")
    own, client = ca.issue("triton"), ca.issue("gateway")
    server = aio.server()
    handler = grpc.unary_unary_rpc_method_handler(_echo)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a", {"B": handler}),))
    pair = (own.key.read_bytes(), own.cert.read_bytes())
    port = server.add_secure_port(
        "127.0.0.1:0", grpc.ssl_server_credentials([pair], ca.file.read_bytes(), require_client_auth=True)
    )
    await server.start()
    trusted = Authority(tmp_path / "other", "other") if fault == "foreign" else ca
    cert_file, key_file = ("", "") if fault == "no certificate" else (str(client.cert), str(client.key))
    files = TlsFiles(where="upstream", ca_file=str(trusted.file), cert_file=cert_file, key_file=key_file)
    tls = client_tls(files, HTTP2)
    try:
        async with anyio.create_task_group() as tasks:
            name = "triton.example" if fault == "other name" else ""
            connection = TritonConnection(f"127.0.0.1:{port}", tasks, tls, name)
            call = connection.call("/a/B", b"hello", timeout_s=20.0)
            if fault:
                with pytest.raises(ConnectFailed):
                    await call.next()
            else:
                assert await call.next() == b"hello"
                assert await call.next() is None
            connection.close()
    finally:
        await server.stop(0)


async def test_an_unusable_certificate_is_refused_with_its_key(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    async with anyio.create_task_group() as tasks:
        clients = UpstreamClients(tasks, lambda model: None)
        with pytest.raises(ConfigError, match=r"upstream\.ca_file"):
            clients.get("127.0.0.1:1", UpstreamConfig(tls=True, ca_file=str(tmp_path / "ca.pem")))
