"""Configuration of a Redis deployment: one server, one behind Sentinels, or a cluster; TLS and an ACL user."""

from __future__ import annotations

import re
from typing import Annotated, Literal
from urllib.parse import unquote

import msgspec
from msgspec import Meta

from causeway_server.router.errors import ConfigError

Topology = Literal["server", "sentinel", "cluster"]
_SCHEMES: dict[str, tuple[Topology, bool]] = {
    "redis": ("server", False),
    "rediss": ("server", True),
    "unix": ("server", False),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
}
_PORTS: dict[Topology, int] = {"server": 6379, "sentinel": 26379, "cluster": 6379}
_FORMS = (
    "Write redis://host:port/0, rediss:// for TLS, unix:///path, redis+sentinel://host:port,host:port/MASTER/0 or "
    "redis+cluster://host:port,host:port."
)


class RedisConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The address of a Redis that needs more settings than a URL."""

    url: Annotated[str, Meta(min_length=1)]
    username: str = ""
    password_file: str = ""
    sentinel_username: str = ""
    sentinel_password_file: str = ""
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""


RedisAddress = str | RedisConfig
"""A URL, or a section with a URL; "" for none."""


class RedisTarget(msgspec.Struct, frozen=True):
    """A parsed and checked RedisConfig."""

    config: RedisConfig
    topology: Topology
    tls: bool
    hosts: tuple[tuple[str, int], ...] = ()  # hosts of the Sentinels, or of some of a cluster's nodes
    master: str = ""  # name of the master at the Sentinels
    database: int = 0


def is_cluster(address: RedisAddress) -> bool:
    return bool(address) and _scheme(address).endswith("+cluster")


def is_sentinel(address: RedisAddress) -> bool:
    return bool(address) and _scheme(address).endswith("+sentinel")


def with_url(address: RedisAddress, url: str) -> RedisAddress:
    """Return the address with another URL and the same user and certificates."""
    return msgspec.structs.replace(address, url=url) if isinstance(address, RedisConfig) else url


def shown_address(address: RedisAddress) -> str:
    """Return the URL for messages, without a password."""
    url = address if isinstance(address, str) else address.url
    netloc, path = _netloc_and_path(url)
    return f"{_scheme(url)}://{netloc.rpartition('@')[2]}{path}"


def parse_redis(address: RedisAddress, where: str) -> RedisTarget:
    """Check an address. Raises ConfigError: the address is invalid; the message says what to write."""
    config = RedisConfig(url=address) if isinstance(address, str) else address
    scheme = _scheme(config)
    if scheme not in _SCHEMES:
        raise ConfigError(_FORMS, where=where)
    topology, tls = _SCHEMES[scheme]
    _check_files(config, topology, tls, where)
    if topology == "server":
        return RedisTarget(config, topology, tls)
    netloc, path = _netloc_and_path(config.url)
    if "@" in netloc:
        raise ConfigError("Write user and password as `username` and `password_file`, not in this URL.", where=where)
    hosts = tuple(_host(text, topology, where) for text in netloc.split(","))
    master, _, database = path.strip("/").partition("/")
    if topology == "cluster":
        if master:
            raise ConfigError("A cluster has no numbered databases. End the URL after the hosts.", where=where)
        return RedisTarget(config, topology, tls, hosts)
    if not master or not (database or "0").isdigit():
        raise ConfigError("Name the master after the hosts: redis+sentinel://host:port/MASTER/0.", where=where)
    return RedisTarget(config, topology, tls, hosts, unquote(master), int(database or "0"))


def _scheme(address: RedisAddress) -> str:
    return (address if isinstance(address, str) else address.url).partition("://")[0]


def _netloc_and_path(url: str) -> tuple[str, str]:
    """Split a URL after its scheme: up to the first slash, and from there up to a query or a fragment.

    `urlsplit` of newer versions of Python refuses a list of hosts with an IPv6 address in it.
    """
    rest = re.split(r"[?#]", url.partition("://")[2], maxsplit=1)[0]
    netloc, slash, path = rest.partition("/")
    return netloc, slash + path


def _host(text: str, topology: Topology, where: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    host, port = (host, port) if colon else (text, str(_PORTS[topology]))
    if not host or not port.isdigit():
        raise ConfigError(f"{text!r} is not of the form `host:port`. {_FORMS}", where=where)
    return host.strip("[]"), int(port)


def _check_files(config: RedisConfig, topology: Topology, tls: bool, where: str) -> None:
    if config.username and not config.password_file:
        raise ConfigError("Set `password_file` together with `username`.", where=f"{where}.username")
    if config.sentinel_username and not config.sentinel_password_file:
        raise ConfigError(
            "Set `sentinel_password_file` together with `sentinel_username`.", where=f"{where}.sentinel_username"
        )
    if config.sentinel_password_file and topology != "sentinel":
        raise ConfigError(
            "`sentinel_password_file` has no effect, because the URL does not name Sentinels. Remove this key.",
            where=f"{where}.sentinel_password_file",
        )
    for name in ("ca_file", "cert_file", "key_file"):
        if getattr(config, name) and not tls:
            raise ConfigError("Certificates need TLS: begin the URL with `rediss`.", where=f"{where}.{name}")
    if bool(config.cert_file) != bool(config.key_file):
        raise ConfigError("Set `cert_file` and `key_file` together.", where=f"{where}.cert_file")
