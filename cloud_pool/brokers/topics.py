"""Topics at a broker: their addresses, the login, and messages.

An address is `nats://host:4222/SUBJECT`; several hosts are separated by commas, and `nats+tls://` uses TLS.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec

from causeway_server.router.errors import CausewayError, ConfigError
from causeway_server.router.serving.tls.contexts import TlsFiles, client_tls

_PORT: Final = 4222
_FORMS: Final = "Write nats://host:4222/SUBJECT, or nats+tls:// for TLS."
_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(\d{1,5}))?")


class BrokerLogin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section `streams.login`: credentials for the broker of all topics."""

    username: str = ""
    password_file: str = ""
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

    tls: bool
    hosts: tuple[str, ...]  # host:port of each server
    topic: str

    def sibling(self, suffix: str) -> TopicAddress:
        """Return the topic at the same broker with `suffix` appended to its name."""
        return msgspec.structs.replace(self, topic=self.topic + suffix)

    def __str__(self) -> str:
        return f"nats{'+tls' if self.tls else ''}://{','.join(self.hosts)}/{self.topic}"


def parse_topic(text: str, where: str) -> TopicAddress:
    """Parse an address. Raises ConfigError: the address is invalid; the message says what to write."""
    scheme, _, rest = text.partition("://")
    if scheme not in ("nats", "nats+tls"):
        raise ConfigError(_FORMS, where=where)
    hosts, _, topic = rest.partition("/")
    if "@" in hosts:
        raise ConfigError("Write user and password in the section `streams.login`, not in this URL.", where=where)
    if not topic or re.search(r"[\s/?#]", topic):
        raise ConfigError(f"The address has no valid topic name. {_FORMS}", where=where)
    return TopicAddress(scheme == "nats+tls", tuple(_host(part, where) for part in hosts.split(",")), topic)


def _host(text: str, where: str) -> str:
    match = _HOST.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text[:80]!r} is not a host:port. {_FORMS}", where=where)
    return f"{match[1]}:{match[2] or _PORT}"


_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class BrokerUnavailable(CausewayError, status=503, code="broker_unavailable", retryable=True):
    """The broker does not answer, or refuses. It is unknown whether the last command took effect."""


class MessageTooLarge(CausewayError, status=413, code="message_too_large"):
    """The broker does not accept a message of this size."""


class IncomingMessage(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A delivery of a message."""

    body: bytes
    headers: Mapping[str, str] = _NO_HEADERS  # names in lower case
    position: str  # place in the topic: the same in each delivery, and unique to the message
    published_at: float  # Unix seconds, by the broker's clock
    receipt: str = ""  # subject of its acknowledgements


class OutgoingMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message to publish. `id` is the same whenever the same message is published again."""

    id: str
    body: bytes
    content_type: str


class TopicLag(msgspec.Struct, frozen=True):
    """Messages that a pipeline has not finished yet."""

    waiting: int  # messages that have not been delivered yet
    unacknowledged: int  # messages that were delivered but not acknowledged
