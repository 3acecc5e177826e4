"""A machine that asks by MQTT: another client of the broker, with paho in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from paho.mqtt import client as mqtt
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions

from causeway_server.edge_node.config.schema import MqttConfig, MqttTopicConfig
from causeway_server.edge_node.jobs.record import OutboxStats
from causeway_server.edge_node.mqtt.bridge import MqttBridge
from causeway_server.edge_node.mqtt.messages import Message
from tests.mosquitto import PATIENCE_S, Mosquitto

from ..device import Device

ASK, ANSWERS = "plant/7/ask", "plant/7/answers"
FILTER, STATE = "plant/+/ask", "causeway/device/state"
NOW = 1000.0  # unix s


def mqtt_config(
    port: int, *, tags: tuple[str, ...] = (), topic: dict[str, Any] | None = None, **keys: Any
) -> MqttConfig:
    """What a test's device takes: requests on `FILTER`, with answers where they say, else on ``TOPIC/answer``."""
    topics = (MqttTopicConfig(**({"filter": FILTER, "answer_topic": "{topic}/answer", "tags": tags} | (topic or {}))),)
    keys = {"response_topics": ("plant/+/answers",), "client_id": "device", "topics": topics} | keys
    return MqttConfig(**{"url": f"mqtt://127.0.0.1:{port}", **keys})


def message(**fields: Any) -> Message:
    """A message as a device receives it."""
    given: dict[str, Any] = {"mid": 5, "topic": ASK, "payload": b"{}", "qos": 1, "retain": False, "dup": False}
    return Message(**(given | fields))


def bridge_of(device: Device) -> MqttBridge:
    assert device.parts.mqtt is not None
    return device.parts.mqtt


def outbox_of(device: Device) -> OutboxStats:
    """What the device has of jobs; before the first one, nothing."""
    return device.parts.jobs.stats or OutboxStats()


class Received(msgspec.Struct, frozen=True):
    """A message that the peer received. `retain`: as it was published."""

    topic: str
    payload: bytes
    retain: bool
    correlation: bytes
    content_type: str
    properties: dict[str, str]

    @property
    def text(self) -> str:
        """The text of a chat answer."""
        return str(json.loads(self.payload)["choices"][0]["message"]["content"])

    @property
    def code(self) -> str:
        return str(json.loads(self.payload)["error"]["code"])


class Peer:
    """Subscribed to everything but requests when it is constructed."""

    def __init__(self, port: int, *, user: str = "", password: str = "") -> None:
        self._received: queue.Queue[Received] = queue.Queue()
        self._client = mqtt.Client(CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv5, reconnect_on_failure=False)
        self._client.max_inflight_messages = 1000
        if user:
            self._client.username_pw_set(user, password)
        subscribed = threading.Event()
        self._client.on_subscribe = lambda *_: subscribed.set()
        self._client.on_message = self._on_message
        self._client.connect("127.0.0.1", port)
        self._client.loop_start()
        options = SubscribeOptions(qos=1, retainAsPublished=True)
        self._client.subscribe([(one, options) for one in ("plant/+/answers", "plant/+/ask/answer", STATE)])
        assert subscribed.wait(PATIENCE_S)

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    def ask(
        self,
        payload: bytes | str = "hello",
        *,
        topic: str = ASK,
        correlation: bytes = b"",
        answers: str = ANSWERS,
        properties: Sequence[tuple[str, str]] = (),
        qos: int = 1,
        retain: bool = False,
        content_type: str = "",
    ) -> mqtt.MQTTMessageInfo:
        """Publish a request: text becomes a chat body. It is at the broker once the result is published."""
        if isinstance(payload, str):
            payload = json.dumps({"model": "auto", "messages": [{"role": "user", "content": payload}]}).encode()
        given = Properties(PacketTypes.PUBLISH)
        if answers:
            given.ResponseTopic = answers
        if correlation:
            given.CorrelationData = correlation
        if content_type:
            given.ContentType = content_type
        if properties:
            given.UserProperty = list(properties)
        return self._client.publish(topic, payload, qos=qos, retain=retain, properties=given)

    async def next(self) -> Received:
        """The next message, of the device's state as well."""
        return await asyncio.to_thread(self._received.get, timeout=PATIENCE_S)

    async def answer(self) -> Received:
        """The next answer."""
        while (received := await self.next()).topic == STATE:
            pass
        return received

    async def state(self, state: str) -> Received:
        """Wait until the device is in this state."""
        while (received := await self.next()).topic != STATE or received.payload.decode() != state:
            pass
        return received

    def _on_message(self, _client: mqtt.Client, _data: Any, message: mqtt.MQTTMessage) -> None:
        given = message.properties
        self._received.put(
            Received(
                message.topic,
                bytes(message.payload),
                message.retain,
                bytes(getattr(given, "CorrelationData", b"")),
                str(getattr(given, "ContentType", "")),
                dict(getattr(given, "UserProperty", ())),
            )
        )


@contextlib.contextmanager
def peer_of(broker: Mosquitto) -> Iterator[Peer]:
    peer = Peer(broker.port)
    try:
        yield peer
    finally:
        peer.close()
