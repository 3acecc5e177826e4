"""A real nats-server that speaks TLS alone and asks for client certificates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import nats
import pytest
from nats.js.api import StreamConfig

from causeway_server.cloud_pool.brokers.open import open_sink, open_source
from causeway_server.cloud_pool.brokers.port import BrokerLogin, parse_topic
from tests.certificates import Authority
from tests.nats_server import NatsServer

from .brokers import outgoing, receive_messages

pytestmark = pytest.mark.nats


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


@pytest.fixture
def server(ca: Authority, tmp_path: Path, nats_server: NatsServer) -> Iterator[NatsServer]:
    """`nats_server`: skips where there is none."""
    own = ca.issue("server")
    files = f"cert_file: '{own.cert}', key_file: '{own.key}', ca_file: '{ca.file}'"
    found = NatsServer(tmp_path, f"tls {{ {files}, verify: true }}")
    try:
        yield found
    finally:
        found.kill()


async def test_messages_go_over_tls_with_certificates_of_both_sides(ca: Authority, server: NatsServer) -> None:
    client = ca.issue("gateway")
    login = BrokerLogin(ca_file=str(ca.file), cert_file=str(client.cert), key_file=str(client.key))
    admin = await nats.connect(f"tls://{server.host}", tls=login.tls_context())
    await admin.jetstream().add_stream(StreamConfig(name="asks", subjects=["asks"]))
    await admin.close()
    address = parse_topic(f"nats+tls://{server.host}/asks", "test")
    sink, source = open_sink(address, "pipeline", login), open_source(address, "group", login, ack_wait_s=5.0)
    await sink.open()
    await source.open()
    await sink.publish(outgoing("a", b"{}"), "", "", repeated=False)
    [message] = await receive_messages(source, 1)
    assert message.body == b"{}"
    await source.close()
    await sink.close()


@pytest.mark.parametrize("fault", ["no certificate", "foreign", "foreign server"])
async def test_neither_side_talks_to_one_that_it_cannot_verify(
    ca: Authority, server: NatsServer, tmp_path: Path, fault: str
) -> None:
    other = Authority(tmp_path / "other", "other")
    client = (other if fault == "foreign" else ca).issue("gateway")
    trusted = str((other if fault == "foreign server" else ca).file)
    cert, key = ("", "") if fault == "no certificate" else (str(client.cert), str(client.key))
    context = BrokerLogin(ca_file=trusted, cert_file=cert, key_file=key).tls_context()
    with pytest.raises((OSError, nats.errors.Error)):
        await nats.connect(f"tls://{server.host}", tls=context, allow_reconnect=False, connect_timeout=5)
