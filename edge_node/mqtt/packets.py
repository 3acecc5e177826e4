"""What packets hold, in paho's words and in ours."""

from __future__ import annotations

from paho.mqtt.client import MQTTMessage
from paho.mqtt.properties import Properties

from router.errors import InvalidRequest
from router.serving.request import combined

from .envelope import Message


def message_of(message: MQTTMessage) -> Message:
    """Return a message as it was received."""
    properties = message.properties
    user_properties: dict[str, str] = {}
    fault: InvalidRequest | None = None
    try:
        user_properties = combined(getattr(properties, "UserProperty", ()))
    except InvalidRequest as error:
        fault = error
    return Message(
        mid=message.mid,
        topic=message.topic,
        payload=bytes(message.payload),
        qos=message.qos,
        retain=message.retain,
        dup=message.dup,
        response_topic=getattr(properties, "ResponseTopic", ""),
        correlation=bytes(getattr(properties, "CorrelationData", b"")),
        expires_s=getattr(properties, "MessageExpiryInterval", None),
        content_type=getattr(properties, "ContentType", ""),
        properties=user_properties,
        fault=fault,
    )


def properties_of(packet: int, **values: object) -> Properties:
    """Return the properties of a packet, by their names in paho; those that are None are left out."""
    properties = Properties(packet)
    for name, value in values.items():
        if value is not None:
            setattr(properties, name, value)
    return properties
