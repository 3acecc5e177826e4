"""Addresses of a tier's endpoints: the configured ones, and those that its DNS names resolve to.

host:port            one Triton, its gRPC port
URL                  one server with OpenAI's API
dns:name:port        every address of the name, resolved again every few seconds
…@zone               host:port or dns:name:port, and its zone
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from urllib.parse import urlsplit

import anyio
import msgspec

from causeway_server.router.errors import ConfigError

from ..upstreams.config import UpstreamConfig
from .config import LoadBalancing

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""Function from name and port to addresses as host:port. Raises OSError."""
_RESOLVE_TIMEOUT_S = 10.0
_FORM = re.compile(r"(?P<dns>dns:)?(?P<host>[^:/@\s\[\]]+|\[[0-9a-fA-F:.]+\]):(?P<port>\d{1,5})(?:@(?P<zone>[^@\s]+))?")
log = logging.getLogger(__name__)


class EndpointAddress(msgspec.Struct, frozen=True):
    host: str  # an IPv6 address keeps its brackets
    port: int
    zone: str = ""
    is_dns: bool = False
    url: str = ""  # base URL of a server with OpenAI's API

    @property
    def address(self) -> str:
        return self.url or f"{self.host}:{self.port}"

    @property
    def text(self) -> str:
        """Configured address, without the zone."""
        return f"dns:{self.address}" if self.is_dns else self.address


class TierEndpoints(msgspec.Struct, frozen=True):
    """Endpoints of a tier's model, and how they are selected."""

    tier: str
    model: str  # its name upstream
    addresses: tuple[EndpointAddress, ...]
    load_balancing: LoadBalancing = "least_loaded"
    only_embeds: bool = False  # a probe must be an embedding
    upstream: UpstreamConfig = UpstreamConfig()


def parse_endpoint_address(text: str, where: str = "") -> EndpointAddress:
    """Parse one configured endpoint. Raises ConfigError; `where` is the key that it names."""
    match = _FORM.fullmatch(text)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise ConfigError(f"{text!r} is not host:port, dns:name:port or one of them with @zone.", where=where)
    if match["dns"] and match["host"].startswith("["):
        raise ConfigError(f"{text!r}: an IP address needs no DNS, remove `dns:`.", where=where)
    return EndpointAddress(match["host"], int(match["port"]), match["zone"] or "", bool(match["dns"]))


def server_address(url: str) -> EndpointAddress:
    """Return the endpoint of a server's base URL, which `UpstreamConfig.check` has accepted."""
    parts = urlsplit(url)
    return EndpointAddress(parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80), url=url)


async def resolve_dns(name: str, port: int) -> Sequence[str]:
    """Resolve a name with the system's resolver. Raises OSError."""
    infos = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    hosts = [f"[{host}]" if family == socket.AF_INET6 else host for family, _, _, _, (host, *_) in infos]
    return [f"{host}:{port}" for host in dict.fromkeys(hosts)]


class EndpointDiscovery:
    """A tier's addresses. A name that cannot be resolved keeps its last ones: an outage of DNS removes no endpoint."""

    def __init__(self, addresses: Sequence[EndpointAddress], resolve: Resolver = resolve_dns) -> None:
        self.configured = tuple(addresses)  # with names unresolved
        self._resolve = resolve
        self._resolved: dict[EndpointAddress, tuple[str, ...]] = {}
        self._unresolved: set[EndpointAddress] = set()

    def replace(self, addresses: Sequence[EndpointAddress]) -> None:
        """Replace the addresses; names that stay keep their resolved addresses."""
        self.configured = tuple(addresses)
        self._resolved = {name: found for name, found in self._resolved.items() if name in addresses}
        self._unresolved &= set(addresses)

    def zones(self) -> Mapping[str, str]:
        """Return each address with its zone; a listed address takes precedence over a resolved one."""
        listed = {entry.address: entry.zone for entry in self.configured if not entry.is_dns}
        resolved = {address: entry.zone for entry in self.configured for address in self._resolved.get(entry, ())}
        return {**resolved, **listed}

    async def refresh(self) -> None:
        """Resolve every name, one after the other."""
        for name in [entry for entry in self.configured if entry.is_dns]:
            try:
                with anyio.fail_after(_RESOLVE_TIMEOUT_S):
                    addresses = await self._resolve(name.host, name.port)
            except (OSError, UnicodeError, TimeoutError) as error:
                self._warn_once(name, str(error) or type(error).__name__)
                continue
            if name in self.configured and addresses:  # It may have been removed while it was resolved.
                self._resolved[name] = tuple(sorted(addresses))
                self._unresolved.discard(name)

    def _warn_once(self, name: EndpointAddress, why: str) -> None:
        if name not in self._unresolved:
            self._unresolved.add(name)
            log.warning("The host name %s cannot be resolved, so its known addresses stay in use: %s", name.host, why)
