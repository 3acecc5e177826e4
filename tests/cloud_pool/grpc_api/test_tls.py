"""gRPC over TLS with gRPC's own client: the certificate's device calls, a client without one does not."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from grpc import aio

from causeway_server.cloud_pool.accounts.identity.config import CertificateIdentityConfig, IdentityConfig
from causeway_server.cloud_pool.config import Config
from causeway_server.cloud_pool.http.config import ServerConfig
from causeway_server.router.config import ListenerTls
from tests.certificates import Authority, Issued
from tests.cloud_pool.accounts.identity.test_over_http import audited
from tests.cloud_pool.unreachable import unreachable_tier

from .served import Client, chat, rest, serving, text_of


async def test_calls_over_mtls(tmp_path: Path) -> None:
    ca = Authority(tmp_path / "ca")
    own = ca.issue("server")
    config = Config(
        server=ServerConfig(tls=ListenerTls(str(own.cert), str(own.key), str(ca.file))),
        identity=IdentityConfig(certificates=CertificateIdentityConfig(tenants=("acme",))),
        tiers=(unreachable_tier("assistant-large"),),
        audit_file=str(tmp_path / "audit"),
    )

    def client(certificate: Issued | None) -> aio.Channel:
        files = () if certificate is None else (certificate.key.read_bytes(), certificate.cert.read_bytes())
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
        credentials = grpc.ssl_channel_credentials(ca.file.read_bytes(), *files)
        return aio.secure_channel(served.server.address, credentials, options=options)

    async with serving(config) as served:
        async with client(ca.issue("kiosk-17", organization="acme")) as channel:
            assert text_of(await rest(Client(channel).call(chat()))) == "my secret answer"
        async with client(ca.issue("kiosk-18", organization="other")) as channel:
            failure = await Client(channel).failure(Client(channel).call(chat()))
            assert failure.status == grpc.StatusCode.UNAUTHENTICATED
        async with client(None) as channel:
            with pytest.raises(aio.AioRpcError) as caught:
                await rest(Client(channel).call(chat()))
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    first = audited(tmp_path / "audit")[0]
    assert (first["tenant"], first["device"]) == ("acme", "kiosk-17")
