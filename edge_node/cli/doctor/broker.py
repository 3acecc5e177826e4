"""Check the broker of a box that takes MQTT: its package, its keys, and that it accepts this box."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Iterator

import msgspec

from router.errors import ConfigError

from ...config.schema import MqttConfig
from ...mqtt.errors import BrokerError
from ...mqtt.topics import BrokerUrl, Topics
from .finding import Finding, fail, ok, warn

_CLIENT_ID = "causeway-doctor"


def check_broker(
    config: MqttConfig, find_package: Callable[[str], object] = importlib.util.find_spec
) -> Iterator[Finding]:
    """Check the keys, connect as a client of its own, and subscribe to nothing. Nothing where there is no broker."""
    if not config.url:
        return
    if find_package("paho") is None:
        found = "mqtt.url is set, and the extra `mqtt` is not installed: the daemon does not start"
        yield fail("mqtt", found, "run `make setup`, or `pip install 'causeway[mqtt]'`")
        return
    try:
        broker = BrokerUrl(config.url)
        Topics(config, config.state_topic)
    except ConfigError as error:
        yield fail("mqtt", str(error), "correct the key")
        return
    yield asyncio.run(_connect(config, broker))


async def _connect(config: MqttConfig, broker: BrokerUrl) -> Finding:
    from ...mqtt.connection import Connection  # the extra is there

    connection = Connection(msgspec.structs.replace(config, session_expiry_s=0.0), _CLIENT_ID, "", lambda _: None)
    try:
        await connection.open()
    except BrokerError as error:
        if error.lasting:
            return fail("mqtt", error.message, "correct the keys of mqtt, or what the broker allows this box")
        return warn("mqtt", error.message, "messages are taken once it answers; check mqtt.url and the firewall")
    finally:
        await connection.close()
    return ok("mqtt", f"the broker {broker} accepts this box")
