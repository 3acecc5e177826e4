"""MQTT where there is no broker, no extra, or no sense in the keys."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from causeway_server.edge_node.app import build
from causeway_server.edge_node.cli.doctor.network import check_broker
from causeway_server.edge_node.config.schema import MqttConfig
from causeway_server.edge_node.mqtt.messages import read_message
from causeway_server.edge_node.mqtt.topics import Topics, overlaps
from causeway_server.router.errors import ConfigError, InvalidRequest
from tests.ports import free_port

from ..device import config
from .peer import NOW, message, mqtt_config

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
        (msgspec.structs.replace(good, url="broker:1883"), "mqtt.url: Must be a URL"),
        (msgspec.structs.replace(good, url="mqtt://device:secret@broker"), "mqtt.url: The URL holds credentials"),
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
    """Correlation data or an event's id; without them the packet's number, if the broker sends it again."""
    (topic,) = mqtt_config(1883).topics

    def key(**fields: Any) -> str:
        return read_message(message(**fields), topic, NOW).key

    event = {"specversion": "1.0", "source": "/sensor", "id": "1"}
    assert key(correlation=b"7") == key(correlation=b"7", mid=6, dup=True)
    assert key(properties=event) == key(properties=event, mid=6)
    assert key() == key(dup=True)
    others = [
        key(),
        key(mid=6),
        key(payload=b"[]"),
        key(correlation=b"7"),
        key(correlation=b"8"),
        key(properties=event),
        key(properties=event | {"id": "2"}),
        key(properties=event | {"causewaytags": "night"}),
        key(response_topic="plant/7/answers"),
        key(topic="plant/8/ask"),
    ]
    assert len(set(others)) == len(others)
    is_new = [read_message(message(**one), topic, NOW).is_new for one in ({}, {"dup": True}, {"correlation": b"7"})]
    assert is_new == [True, False, False]


def test_the_earliest_end_is_the_deadline() -> None:
    """The topic's, or the message's own expiry."""
    (topic,) = mqtt_config(1883, topic={"deadline_s": 60.0}).topics
    assert read_message(message(), topic, NOW).deadline_ms == 60_000
    assert read_message(message(expires_s=7), topic, NOW).deadline_ms == 7_000
    (topic,) = mqtt_config(1883).topics
    assert read_message(message(), topic, NOW).deadline_ms is None
    assert read_message(message(expires_s=1 << 32), topic, NOW).deadline_ms == (1 << 32) * 1000
