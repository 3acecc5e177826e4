"""The history of a conversation that a cloud stores: how the device reads it."""

from __future__ import annotations

import ssl
from pathlib import Path

from aiohttp import web

from causeway_server.edge_node.backends.cloud.backend import CloudBackend
from causeway_server.edge_node.backends.cloud.history import CloudHistory
from causeway_server.edge_node.config.schema import CloudConfig
from causeway_server.router.serving.upstream.server import FixedToken
from tests.certificates import Authority


async def test_a_cloud_that_asks_for_certificates_gets_that_of_the_fleet(tmp_path: Path) -> None:
    """With the client's own key, as everything that is read for a client."""
    ca = Authority(tmp_path / "ca")
    server, issued = ca.issue("server"), ca.issue("device")
    both = tmp_path / "device.pem"
    both.write_bytes(issued.cert.read_bytes() + issued.key.read_bytes())
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(ca.file))
    tls.load_cert_chain(server.cert, server.key)
    tls.verify_mode = ssl.CERT_REQUIRED
    keys = []

    async def handle(request: web.BaseRequest) -> web.Response:
        keys.append(request.headers["authorization"])
        return web.json_response({}, status=404)

    runner = web.ServerRunner(web.Server(handle))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    config = CloudConfig(url=f"https://127.0.0.1:{runner.addresses[0][1]}/v1", ca_file=str(ca.file))
    backend = CloudBackend(config, credentials=FixedToken("the fleet's", str(both)))
    try:
        assert await CloudHistory(backend.address, 1024).read("a-client's", f"resp_{'0' * 24}") is None
    finally:
        await backend.close()
        await runner.cleanup()
    assert keys == ["Bearer a-client's"]
