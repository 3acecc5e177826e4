"""Addresses of topics: `nats://host:4222/SUBJECT` or `kafka://host:9092/TOPIC`.

Several hosts are separated by commas; `nats+tls://` and `kafka+tls://` use TLS.
"""

from __future__ import annotations

import re
import ssl
from pathlib import Path
from typing import Final, Literal

import msgspec

from router.errors import ConfigError

BrokerKind = Literal["nats", "kafka"]
_SCHEMES: Final[dict[str, tuple[BrokerKind, bool]]] = {
    "nats": ("nats", False),
    "nats+tls": ("nats", True),
    "kafka": ("kafka", False),
    "kafka+tls": ("kafka", True),
}
_PORTS: Final[dict[BrokerKind, int]] = {"nats": 4222, "kafka": 9092}
_FORMS: Final = "write nats://host:4222/SUBJECT or kafka://host:9092/TOPIC; nats+tls:// or kafka+tls:// for TLS"
_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(\d{1,5}))?")


class BrokerLogin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section `streams.login`: how to log in at the brokers of both topics."""

    username: str = ""  # needs `password_file`
    password_file: str = ""  # without `username`, a token (NATS)
    sasl: Literal["SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN"] = "SCRAM-SHA-512"  # how Kafka asks for them
    ca_file: str = ""  # PEM certificates of the authorities that are trusted; empty: the system's
    cert_file: str = ""  # PEM certificate of this client, if the brokers ask for one
    key_file: str = ""  # private key of `cert_file`

    def check(self) -> None:
        """Raises ConfigError."""
        if self.username and not self.password_file:
            raise ConfigError("a user needs a password_file", where="streams.login.username")
        if bool(self.cert_file) != bool(self.key_file):
            raise ConfigError("`cert_file` and `key_file` go together", where="streams.login.cert_file")

    def password(self) -> str:
        """Return what the file says now; "" without a file. Raises ConfigError."""
        if not self.password_file:
            return ""
        try:
            return Path(self.password_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.password_file}: {error}", where="streams.login.password_file") from error

    def tls_context(self) -> ssl.SSLContext:
        """Raises ConfigError."""
        try:
            context = ssl.create_default_context(cafile=self.ca_file or None)
            if self.cert_file:
                context.load_cert_chain(self.cert_file, self.key_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"the certificates are unusable: {error}", where="streams.login") from error
        return context


class TopicAddress(msgspec.Struct, frozen=True):
    """A topic at its broker."""

    kind: BrokerKind
    tls: bool
    hosts: tuple[str, ...]  # host:port
    topic: str

    def sibling(self, suffix: str) -> TopicAddress:
        """Return the topic at the same broker whose name has `suffix`."""
        return msgspec.structs.replace(self, topic=self.topic + suffix)

    def __str__(self) -> str:
        scheme = next(name for name, kind in _SCHEMES.items() if kind == (self.kind, self.tls))
        return f"{scheme}://{','.join(self.hosts)}/{self.topic}"


def parse_topic(text: str, where: str) -> TopicAddress:
    """Parse an address.

    Args:
        where: the option of the address.

    Raises:
        ConfigError: names what is wrong and what to write.
    """
    scheme, _, rest = text.partition("://")
    if scheme not in _SCHEMES:
        raise ConfigError(_FORMS, where=where)
    kind, tls = _SCHEMES[scheme]
    hosts, _, topic = rest.partition("/")
    if "@" in hosts:
        raise ConfigError("write user and password in the section `streams.login`, not in this URL", where=where)
    if not topic or re.search(r"[\s/?#]", topic):
        raise ConfigError(
            f"the address names no topic, or one with a character that it cannot have: {_FORMS}", where=where
        )
    return TopicAddress(kind, tls, tuple(_host(part, kind, where) for part in hosts.split(",")), topic)


def _host(text: str, kind: BrokerKind, where: str) -> str:
    found = _HOST.fullmatch(text)
    if found is None:
        raise ConfigError(f"{text[:80]!r} is no host:port. {_FORMS}", where=where)
    return f"{found[1]}:{found[2] or _PORTS[kind]}"
