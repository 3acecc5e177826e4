"""The choice of the adapter for an address. The client libraries are extras, which are imported on demand."""

from __future__ import annotations

from causeway_server.router.errors import ConfigError

from .port import BrokerLogin, MessageSink, MessageSource, TopicAddress

_MISSING = "The client for this broker is not installed: run `pip install 'causeway-router[{extra}]'`."


def open_source(address: TopicAddress, name: str, login: BrokerLogin, *, ack_wait_s: float) -> MessageSource:
    """Build the source of the pipeline `name`, which connects when it is opened.

    `ack_wait_s`: silence after which a process's messages are redelivered to others. Raises ConfigError without the
    broker's client, or with an unusable login.
    """
    try:
        if address.kind == "kafka":
            from .kafka.source import KafkaSource

            return KafkaSource(address, name, login, lost_after_s=ack_wait_s)
        from .jetstream import JetStreamSource
    except ImportError as error:
        raise ConfigError(_MISSING.format(extra=address.kind), where="--in") from error
    return JetStreamSource(address, name, login, ack_wait_s=ack_wait_s)


def open_sink(address: TopicAddress, name: str, login: BrokerLogin) -> MessageSink:
    """Build a sink of a pipeline; it connects when it is opened. Raises ConfigError like `open_source`."""
    try:
        if address.kind == "kafka":
            from .kafka.sink import KafkaSink

            return KafkaSink(address, name, login)
        from .jetstream import JetStreamSink
    except ImportError as error:
        raise ConfigError(_MISSING.format(extra=address.kind), where="--out") from error
    return JetStreamSink(address, login)
