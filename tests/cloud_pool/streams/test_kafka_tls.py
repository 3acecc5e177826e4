"""A broker of Kafka's protocol that speaks TLS alone and asks for client certificates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from causeway_server.cloud_pool.brokers.open import open_sink, open_source
from causeway_server.cloud_pool.brokers.port import BrokerLogin, parse_topic
from tests.certificates import Authority, Issued
from tests.kafka_server import KafkaServer

from .brokers import outgoing, receive_messages

pytestmark = pytest.mark.kafka


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


@pytest.fixture
def start(ca: Authority, kafka_server: KafkaServer) -> Iterator[Callable[..., KafkaServer]]:
    """`kafka_server`: skips where there is none."""
    started: list[KafkaServer] = []

    def server(own: Issued) -> KafkaServer:
        started.append(KafkaServer(own.cert, own.key, ca.file))
        return started[-1]

    yield server
    for one in started:
        one.close()


def _login(ca: Authority, client: Issued | None) -> BrokerLogin:
    cert, key = ("", "") if client is None else (str(client.cert), str(client.key))
    return BrokerLogin(ca_file=str(ca.file), cert_file=cert, key_file=key)


async def test_messages_go_over_tls_with_certificates_of_both_sides(
    ca: Authority, start: Callable[..., KafkaServer]
) -> None:
    server, login = start(ca.issue("server")), _login(ca, ca.issue("gateway"))
    server.create_topic("asks")
    address = parse_topic(f"kafka+tls://{server.host}/asks", "test")
    sink, source = open_sink(address, "pipeline", login), open_source(address, "group", login, ack_wait_s=5.0)
    await sink.open()
    await source.open()
    await sink.publish(outgoing("a", b"{}"), "", await sink.position(""), repeated=False)
    [message] = await receive_messages(source, 1)
    assert message.body == b"{}"
    await source.close()
    await sink.close()


@pytest.mark.parametrize("fault", ["no certificate", "foreign", "foreign server", "expired server", "plain server"])
async def test_neither_side_talks_to_one_that_it_cannot_verify(
    ca: Authority, start: Callable[..., KafkaServer], kafka_server: KafkaServer, tmp_path: Path, fault: str
) -> None:
    from aiokafka import AIOKafkaProducer

    from causeway_server.cloud_pool.brokers.kafka.client import FAULTS, client_options

    other = Authority(tmp_path / "other", "other")
    own = ca.issue("server", begins=-3, ends=-1) if fault == "expired server" else ca.issue("server")
    server = kafka_server if fault == "plain server" else start(own)
    client = None if fault == "no certificate" else (other if fault == "foreign" else ca).issue("gateway")
    login = _login(other if fault == "foreign server" else ca, client)
    options = client_options(parse_topic(f"kafka+tls://{server.host}/asks", "test"), login)
    producer = AIOKafkaProducer(**options)
    with pytest.raises(FAULTS):
        await producer.start()
    await producer.stop()
