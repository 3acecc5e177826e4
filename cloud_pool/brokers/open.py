"""An address -> its adapter. The client libraries are extras, imported on demand."""

from __future__ import annotations

from router.errors import ConfigError

from .address import BrokerLogin, TopicAddress
from .port import MessageSink, MessageSource

_MISSING = "the client of this broker is not installed: pip install 'causeway[{extra}]'"


def open_source(address: TopicAddress, name: str, login: BrokerLogin, *, ack_wait_s: float) -> MessageSource:
    """Build the source of a pipeline; it connects when it is opened.

    Args:
        name: of the pipeline; its processes share what was acknowledged
        ack_wait_s: a message that is neither acknowledged nor kept for so long is delivered again

    Raises:
        ConfigError: the broker's client is not installed, or the login is unusable.
    """
    try:
        from .nats_jetstream import JetStreamSource
    except ImportError as error:
        raise ConfigError(_MISSING.format(extra=address.kind), where="--in") from error
    return JetStreamSource(address, name, login, ack_wait_s=ack_wait_s)


def open_sink(address: TopicAddress, login: BrokerLogin) -> MessageSink:
    """Build a sink; it connects when it is opened. Raises ConfigError as `open_source` does."""
    try:
        from .nats_jetstream import JetStreamSink
    except ImportError as error:
        raise ConfigError(_MISSING.format(extra=address.kind), where="--out") from error
    return JetStreamSink(address, login)
