"""The addresses of a tier's endpoints: those that the configuration lists, and those that its DNS names resolve to.

host:port            one Triton, its gRPC port
dns:name:port        every address of the name, resolved again every few seconds
…@zone               either of them, and its zone
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence

import anyio
import msgspec

from causeway_server.router.errors import ConfigError

from .config import LoadBalancing

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""Name and port → addresses as host:port. Raises OSError."""
_RESOLVE_TIMEOUT_S = 10.0
_FORM = re.compile(r"(?P<dns>dns:)?(?P<host>[^:/@\s\[\]]+|\[[0-9a-fA-F:.]+\]):(?P<port>\d{1,5})(?:@(?P<zone>[^@\s]+))?")
_log = logging.getLogger(__name__)


class EndpointAddress(msgspec.Struct, frozen=True):
    host: str  # an IPv6 address keeps its brackets
    port: int
    zone: str = ""
    is_dns: bool = False

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def text(self) -> str:
        """As it is configured, without the zone."""
        return f"dns:{self.address}" if self.is_dns else self.address


class TierEndpoints(msgspec.Struct, frozen=True):
    """Where a tier's model is served, and how its endpoints are selected."""

    tier: str
    model: str  # its name in Triton
    addresses: tuple[EndpointAddress, ...]
    load_balancing: LoadBalancing = "least_loaded"
    only_embeds: bool = False  # a probe must be an embedding


def parse_endpoint_address(text: str, where: str = "") -> EndpointAddress:
    """Parse one configured endpoint. Raises ConfigError; `where` is the key that it names."""
    found = _FORM.fullmatch(text)
    if found is None or not 0 < int(found["port"]) < 65536:
        raise ConfigError(f"{text!r} is not host:port, dns:name:port or one of them with @zone", where=where)
    if found["dns"] and found["host"].startswith("["):
        raise ConfigError(f"{text!r}: an IP address needs no DNS, remove `dns:`", where=where)
    return EndpointAddress(found["host"], int(found["port"]), found["zone"] or "", bool(found["dns"]))


async def resolve_dns(name: str, port: int) -> Sequence[str]:
    """Resolve a name with the system's resolver. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    hosts = [f"[{host}]" if family == socket.AF_INET6 else host for family, _, _, _, (host, *_) in found]
    return [f"{host}:{port}" for host in dict.fromkeys(hosts)]


class EndpointDiscovery:
    """One tier's addresses. A name that cannot be resolved keeps its last addresses, so that a resolver outage removes
    no endpoint."""

    def __init__(self, addresses: Sequence[EndpointAddress], resolve: Resolver = resolve_dns) -> None:
        self.configured = tuple(addresses)  # with names unresolved
        self._resolve = resolve
        self._resolved: dict[EndpointAddress, tuple[str, ...]] = {}
        self._unresolved: set[EndpointAddress] = set()

    def replace(self, addresses: Sequence[EndpointAddress]) -> None:
        """Take other addresses; names that stay keep what they resolved to."""
        self.configured = tuple(addresses)
        self._resolved = {name: found for name, found in self._resolved.items() if name in addresses}
        self._unresolved &= set(addresses)

    def zones(self) -> Mapping[str, str]:
        """Return each address with its zone; a listed address takes precedence over a resolved one."""
        listed = {one.address: one.zone for one in self.configured if not one.is_dns}
        resolved = {address: one.zone for one in self.configured for address in self._resolved.get(one, ())}
        return {**resolved, **listed}

    async def refresh(self) -> None:
        """Resolve every name, one after the other."""
        for name in [one for one in self.configured if one.is_dns]:
            try:
                with anyio.fail_after(_RESOLVE_TIMEOUT_S):
                    found = await self._resolve(name.host, name.port)
            except (OSError, UnicodeError, TimeoutError) as error:
                self._warn_once(name, str(error) or type(error).__name__)
                continue
            if name in self.configured and found:  # It may have been removed while it was resolved.
                self._resolved[name] = tuple(sorted(found))
                self._unresolved.discard(name)

    def _warn_once(self, name: EndpointAddress, why: str) -> None:
        if name not in self._unresolved:
            self._unresolved.add(name)
            _log.warning("%s cannot be resolved, its endpoints stay as they are: %s", name.host, why)
