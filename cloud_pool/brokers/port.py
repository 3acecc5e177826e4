"""The interface between pipelines and brokers, and the addresses of topics.

`tests/cloud_pool/streams` tests every adapter against this contract. An address is `nats://host:4222/SUBJECT` or
`kafka://host:9092/TOPIC`; several hosts are separated by commas, and `nats+tls://` and `kafka+tls://` use TLS.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, Protocol

import msgspec

from causeway_server.router.errors import CausewayError, ConfigError
from causeway_server.router.serving.tls.contexts import TlsFiles, client_tls

BrokerKind = Literal["nats", "kafka"]
_SCHEMES: Final[dict[str, tuple[BrokerKind, bool]]] = {
    "nats": ("nats", False),
    "nats+tls": ("nats", True),
    "kafka": ("kafka", False),
    "kafka+tls": ("kafka", True),
}
_PORTS: Final[dict[BrokerKind, int]] = {"nats": 4222, "kafka": 9092}
_FORMS: Final = "Write nats://host:4222/SUBJECT or kafka://host:9092/TOPIC; nats+tls:// or kafka+tls:// for TLS."
_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(\d{1,5}))?")


class BrokerLogin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section `streams.login`: credentials for the brokers of both topics."""

    username: str = ""
    password_file: str = ""
    sasl: Literal["SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN"] = "SCRAM-SHA-512"
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""

    def check(self) -> None:
        """Check the section. Raises ConfigError."""
        if self.username and not self.password_file:
            raise ConfigError("Set `password_file` together with `username`.", where="streams.login.username")
        if bool(self.cert_file) != bool(self.key_file):
            raise ConfigError("Set `cert_file` and `key_file` together.", where="streams.login.cert_file")

    def password(self) -> str:
        """Return the current content of the password file; "" without a file. Raises ConfigError."""
        if not self.password_file:
            return ""
        try:
            return Path(self.password_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.password_file}: {error}", where="streams.login.password_file") from error

    def tls_context(self) -> ssl.SSLContext:
        """Build the TLS context. Raises ConfigError."""
        files = TlsFiles(where="streams.login", ca_file=self.ca_file, cert_file=self.cert_file, key_file=self.key_file)
        return client_tls(files, alpn=())


class TopicAddress(msgspec.Struct, frozen=True):
    """A topic at its broker."""

    kind: BrokerKind
    tls: bool
    hosts: tuple[str, ...]  # host:port of each server
    topic: str

    def sibling(self, suffix: str) -> TopicAddress:
        """Return the topic at the same broker with `suffix` appended to its name."""
        return msgspec.structs.replace(self, topic=self.topic + suffix)

    def __str__(self) -> str:
        scheme = next(name for name, kind in _SCHEMES.items() if kind == (self.kind, self.tls))
        return f"{scheme}://{','.join(self.hosts)}/{self.topic}"


def parse_topic(text: str, where: str) -> TopicAddress:
    """Parse an address. Raises ConfigError: the address is invalid; the message says what to write."""
    scheme, _, rest = text.partition("://")
    if scheme not in _SCHEMES:
        raise ConfigError(_FORMS, where=where)
    kind, tls = _SCHEMES[scheme]
    hosts, _, topic = rest.partition("/")
    if "@" in hosts:
        raise ConfigError("Write user and password in the section `streams.login`, not in this URL.", where=where)
    if not topic or re.search(r"[\s/?#]", topic):
        raise ConfigError(f"The address has no valid topic name. {_FORMS}", where=where)
    return TopicAddress(kind, tls, tuple(_host(part, kind, where) for part in hosts.split(",")), topic)


def _host(text: str, kind: BrokerKind, where: str) -> str:
    match = _HOST.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text[:80]!r} is not of the form `host:port`. {_FORMS}", where=where)
    return f"{match[1]}:{match[2] or _PORTS[kind]}"


_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class BrokerUnavailable(CausewayError, status=503, code="broker_unavailable", retryable=True):
    """The broker does not answer, or refuses. It is unknown whether the last command took effect."""


class MessageTooLarge(CausewayError, status=413, code="message_too_large"):
    """The broker does not accept a message of this size."""


class IncomingMessage(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A delivery of a message."""

    body: bytes
    headers: Mapping[str, str] = _NO_HEADERS  # names in lower case
    key: str = ""  # key that the broker assigns; "" for none
    lane: str = ""  # partition that the message came from; "" if the broker has none
    position: str  # place in the topic: the same in each delivery, and unique to the message
    published_at: float  # Unix seconds, by the broker's clock
    receipt: object = None  # data of the adapter itself


class OutgoingMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message to publish. `id` is the same whenever the same message is published again."""

    id: str
    body: bytes
    content_type: str
    key: str = ""


class TopicLag(msgspec.Struct, frozen=True):
    """Messages that a pipeline has not finished yet."""

    waiting: int  # messages that have not been delivered yet
    unacknowledged: int  # messages that were delivered but not acknowledged


class MessageSource(Protocol):
    """Receives the messages of a topic for one pipeline. Every method raises BrokerUnavailable while the broker does
    not answer.

    1. A message is delivered until it is acknowledged: again after a lost connection, a killed pipeline or broker.
    2. First deliveries come in the order of the topic (within each lane, if it has lanes). After a lost connection all
    unacknowledged messages come again, in this order, before any new one.
    3. If `needs_lease` is set, only one process may receive at a time; else the broker divides the lanes among them.
    """

    needs_lease: bool

    async def open(self) -> None:
        """Connect, waiting for the broker indefinitely. Raises ConfigError for a topic that does not exist."""

    async def receive(self, most: int, wait_s: float, gather_s: float) -> list[IncomingMessage]:
        """Wait at most `wait_s` for a message, then `gather_s` for more, and return at most `most`."""

    async def acknowledge(self, message: IncomingMessage) -> None:
        """Acknowledge a message, so that it is not delivered again. A lost acknowledgement costs one more delivery."""

    async def extend_ack(self, messages: Sequence[IncomingMessage]) -> None:
        """Extend the acknowledgement deadline of messages in progress, so that they are not redelivered for now."""

    async def reset(self) -> None:
        """Drop all unacknowledged deliveries. The next `receive` gets them again, in order."""

    async def lost_lanes(self) -> set[str]:
        """Wait until other processes have taken over lanes of this process, and return these lanes."""

    async def lag(self) -> TopicLag:
        """Return the consumer lag of the whole topic, or of the lanes of this process."""

    async def close(self) -> None:
        """Disconnect. Unacknowledged messages are delivered to another process."""


class MessageSink(Protocol):
    """Publishes to a topic. Every method raises BrokerUnavailable while the broker does not answer."""

    @property
    def max_bytes(self) -> int:
        """Maximum size of one message's body, in bytes."""

    async def open(self) -> None:
        """Connect, waiting for the broker indefinitely. Raises ConfigError for a topic that does not exist."""

    async def position(self, lane: str) -> str:
        """Return a position in the topic before all messages that will be published for the lane from now on.

        If the broker can enforce it, no other process then publishes for the lane without searching the topic first.
        """

    async def publish(self, message: OutgoingMessage, lane: str, position: str, *, repeated: bool) -> bool:
        """Publish a message and wait until it is stored; returns False if it was already. Raises MessageTooLarge.

        Args:
            lane: Lane of the message that this one answers.
            position: Result of `position` before the first attempt to publish it.
            repeated: Whether it may be in the topic: an earlier call, perhaps elsewhere, had an unknown outcome.
        """

    async def close(self) -> None: ...
