"""MQTT where there is no broker, no extra, or no sense in the keys."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from causeway_server.edge_node.app import build
from causeway_server.edge_node.cli.doctor.network import check_broker
from causeway_server.edge_node.config.schema import MqttConfig
from causeway_server.edge_node.mqtt.connection import Connection
from causeway_server.edge_node.mqtt.messages import BrokerError, check_message, read_message
from causeway_server.edge_node.mqtt.topics import Topics, overlaps
from causeway_server.router.errors import ConfigError, InvalidRequest, UnsupportedMediaType
from tests.ports import free_port

from ..device import config
from .peer import message, mqtt_config

_PROGRAM = """
import sys
from pathlib import Path
sys.modules["paho"] = None  # not installed
from causeway_server.edge_node.app import build
from causeway_server.edge_node.config.schema import Config, MqttConfig, MqttTopicConfig
from causeway_server.router.errors import ConfigError
try:
    build(Config(state_dir=sys.argv[1], mqtt=MqttConfig(url="mqtt://broker")))
except ConfigError as error:
    print(error)
"""


@pytest.mark.slow
def test_an_extra_that_is_missing_is_named(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path)], capture_output=True, text=True, check=False, timeout=60.0
    )
    assert run.stdout.startswith("mqtt.url: needs the extra `mqtt`"), run.stderr


def test_what_cannot_work_is_refused_at_the_start(tmp_path: Path) -> None:
    """Each error names the key."""
    good = mqtt_config(1883)
    (topic,) = good.topics
    bad: list[tuple[MqttConfig, str]] = [
        (msgspec.structs.replace(good, url="broker:1883"), "mqtt.url: The URL must be"),
        (msgspec.structs.replace(good, url="mqtt://device:secret@broker"), "mqtt.url: The URL holds credentials"),
        (msgspec.structs.replace(good, url="mqtt://broker:99999"), "mqtt.url: Port out of range"),
        (msgspec.structs.replace(good, url="mqtt://broker:one"), "mqtt.url: Port could not be cast"),
        (msgspec.structs.replace(good, topics=()), "mqtt.topics: The list is empty"),
        (msgspec.structs.replace(good, topics=(msgspec.structs.replace(topic, filter="a/#/b"),)), "is not a filter"),
        (msgspec.structs.replace(good, topics=(topic, msgspec.structs.replace(topic, filter="#"))), "match the same"),
        (
            msgspec.structs.replace(
                good, topics=(msgspec.structs.replace(topic, filter="plant/#", answer_topic="plant/answers"),)
            ),
            "accepts requests",
        ),
        (
            msgspec.structs.replace(
                good, topics=(msgspec.structs.replace(topic, answer_topic=""),), response_topics=()
            ),
            "no topic for answers",
        ),
        (msgspec.structs.replace(good, topics=(msgspec.structs.replace(topic, system="x"),)), "`system` is only for"),
        (msgspec.structs.replace(good, state_topic="plant/1/ask"), "mqtt.state_topic"),
    ]
    for settings, words in bad:
        with pytest.raises(ConfigError, match=words):
            build(msgspec.structs.replace(config(tmp_path), mqtt=settings))


def test_the_doctor_says_what_is_wrong_with_the_broker() -> None:
    """Nothing without a broker; the extra, a key, or that nothing answers."""
    settings = mqtt_config(free_port())
    assert list(check_broker(MqttConfig())) == []
    (missing,) = check_broker(settings, lambda _: None)
    assert (missing.level, "pip install 'causeway-router[mqtt]'" in missing.advice) == ("fail", True)
    (wrong,) = check_broker(msgspec.structs.replace(settings, topics=()))
    assert (wrong.level, wrong.found.split(":")[0]) == ("fail", "mqtt.topics")
    (away,) = check_broker(settings)
    assert (away.level, "Connection refused" in away.found) == ("warn", True)


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [
        ("plant/+/ask", "plant/7/ask", True),
        ("plant/#", "plant", True),
        ("plant/+", "plant/7/ask", False),
        ("a/b", "a/b/c", False),
        ("+/b", "a/+", True),
        ("+/b/#", "a/c/#", False),
        ("#", "$SYS/uptime", False),
        ("$SYS/#", "$SYS/uptime", True),
    ],
)
def test_filters_that_match_the_same_topic(first: str, second: str, *, both: bool) -> None:
    assert overlaps(first, second) == overlaps(second, first) == both


def test_answers_go_where_this_device_may_answer() -> None:
    """A topic of requests, of the broker, with a wildcard, or one that is not listed is refused."""
    topics = Topics(mqtt_config(1883), "causeway/device/state")
    found = topics.find("plant/7/ask")
    assert found is not None
    assert topics.find("plant/7/ask/answer") is None
    assert topics.answer_topic(found, "plant/7/ask", "") == "plant/7/ask/answer"
    assert topics.answer_topic(found, "plant/7/ask", "plant/9/answers") == "plant/9/answers"
    for response_topic in (
        "plant/8/ask",
        "$SYS/x",
        "plant/+/answers",
        "valve/open",
        "causeway/device/state",
        "x" * 2000,
    ):
        with pytest.raises(InvalidRequest, match="The response topic"):
            topics.answer_topic(found, "plant/7/ask", response_topic)


def test_what_makes_two_messages_the_same_job() -> None:
    """Correlation data; without any the packet's number, if the broker sends it again."""
    (topic,) = mqtt_config(1883).topics

    def key(**fields: Any) -> str:
        return read_message(message(**fields), topic).key

    assert key(correlation=b"7") == key(correlation=b"7", mid=6, dup=True)
    assert key() == key(dup=True)
    others = [
        key(),
        key(mid=6),
        key(payload=b"[]"),
        key(correlation=b"7"),
        key(correlation=b"8"),
        key(properties={"x-causeway-tags": "night"}),
        key(response_topic="plant/7/answers"),
        key(topic="plant/8/ask"),
    ]
    assert len(set(others)) == len(others)
    is_new = [read_message(message(**one), topic).is_new for one in ({}, {"dup": True}, {"correlation": b"7"})]
    assert is_new == [True, False, False]


def test_the_earliest_end_is_the_deadline() -> None:
    """The topic's, or the message's own expiry."""
    (topic,) = mqtt_config(1883, topic={"deadline_s": 60.0}).topics
    assert read_message(message(), topic).deadline_ms == 60_000
    assert read_message(message(expires_s=7), topic).deadline_ms == 7_000
    (topic,) = mqtt_config(1883).topics
    assert read_message(message(), topic).deadline_ms is None
    assert read_message(message(expires_s=1 << 32), topic).deadline_ms == (1 << 32) * 1000


def test_text_is_the_users_message_after_the_topics_own() -> None:
    (topic,) = mqtt_config(1883, topic={"form": "text", "system": "Be brief."}).topics
    body = json.loads(read_message(message(payload="Grüße?".encode()), topic).body)
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße?"}]


@pytest.mark.parametrize(
    ("payload", "said"), [(b"", "is empty"), (b" \n\t", "is empty"), (b"\xff\xfe", "is not UTF-8 text")]
)
def test_text_that_says_nothing_is_refused(payload: bytes, said: str) -> None:
    (topic,) = mqtt_config(1883, topic={"form": "text"}).topics
    with pytest.raises(InvalidRequest, match=said):
        read_message(message(payload=payload), topic)


def test_a_message_beyond_its_limits_is_refused_before_it_is_read() -> None:
    """What is retained would come again for ever."""
    check_message(message(payload=b"12345678", correlation=b"c" * 1024), 8)
    for refused, said in (
        (message(payload=b"123456789"), "larger than 8 bytes"),
        (message(correlation=b"c" * 65_000), "correlation data are longer"),
        (message(retain=True), "again and again"),
        (message(fault=InvalidRequest("A property comes twice.")), "comes twice"),
    ):
        with pytest.raises(InvalidRequest, match=said):
            check_message(refused, 8)


@pytest.mark.parametrize(
    "event",
    [
        {"content_type": "application/cloudevents+json"},
        *({"properties": {name: "1"}} for name in ("specversion", "causewaytags", "causewaypriority", "expirytime")),
    ],
)
def test_an_event_is_refused_in_both_modes(event: dict[str, Any]) -> None:
    """Its tags would be lost, and with them that it is private."""
    with pytest.raises(UnsupportedMediaType, match="`x-causeway-tags` and `x-causeway-priority`"):
        check_message(message(**event), 8)


# --- connecting -------------------------------------------------------------------------------------------------------


async def fault_of(settings: MqttConfig) -> BrokerError:
    """Return the error with which a connection to the broker fails."""
    connection = Connection(settings, "device", "", lambda _: None)
    with pytest.raises(BrokerError) as raised:
        await connection.open()
    await connection.close()
    return raised.value


@pytest.mark.parametrize("content", [None, b"pass\xffword"], ids=["missing", "not UTF-8"])
async def test_a_password_that_cannot_be_read_is_named_and_lasts(tmp_path: Path, content: bytes | None) -> None:
    """No connection is tried: only an operator can help."""
    file = tmp_path / "password"
    if content is not None:
        file.write_bytes(content)
    error = await fault_of(mqtt_config(free_port(), username="device", password_file=str(file)))
    assert str(error).startswith(f"The file {file} (mqtt.password_file) cannot be read")
    assert error.lasting


@pytest.mark.parametrize("key", ["ca_file", "cert_file"])
async def test_tls_files_that_cannot_be_used_are_named_and_last(tmp_path: Path, key: str) -> None:
    file = tmp_path / "file.pem"
    file.write_text("no certificate")
    port = free_port()
    settings = mqtt_config(port, url=f"mqtts://127.0.0.1:{port}")
    error = await fault_of(msgspec.structs.replace(settings, **{key: str(file)}))
    assert str(error).startswith(f"mqtt.{key}: {file} holds no PEM certificate")
    assert error.lasting


@pytest.mark.parametrize(
    ("scheme", "answer", "lasting", "said"),
    [
        ("mqtts", b"HTTP/1.1 400 Bad Request\r\n\r\n", True, "TLS with"),
        ("mqtts", b"", False, "closed the connection during the TLS handshake"),
        ("mqtt", b"", False, "closed the connection before it accepted the connection: does it require TLS"),
    ],
    ids=["a server without TLS", "one that closes", "one that wants TLS"],
)
async def test_a_server_that_is_no_such_broker_is_told(scheme: str, answer: bytes, lasting: bool, said: str) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    error = await fault_of(mqtt_config(port, url=f"{scheme}://127.0.0.1:{port}"))
    server.close()
    assert said in str(error)
    assert f"127.0.0.1:{port}" in str(error)
    assert error.lasting is lasting
