"""Which addresses a tier has: those that are written down, and those that its DNS names have now."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence

import anyio

from .endpoint_address import EndpointAddress

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""Name and port → addresses as host:port. Raises OSError."""
_PATIENCE_S = 10.0
_log = logging.getLogger("causeway.cloud.pool")


async def resolve_dns(name: str, port: int) -> Sequence[str]:
    """The system's resolver. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    hosts = [f"[{host}]" if family == socket.AF_INET6 else host for family, _, _, _, (host, *_) in found]
    return [f"{host}:{port}" for host in dict.fromkeys(hosts)]


class EndpointDiscovery:
    """A name that cannot be resolved keeps the addresses it had: a resolver that is away takes no endpoint along."""

    def __init__(self, places: Sequence[EndpointAddress], resolve: Resolver = resolve_dns) -> None:
        self._places = tuple(places)
        self._resolve = resolve
        self._known: dict[EndpointAddress, tuple[str, ...]] = {}
        self._unknown: set[EndpointAddress] = set()

    def move(self, places: Sequence[EndpointAddress]) -> None:
        """Other places from now on; names that stay keep what is known of them."""
        self._places = tuple(places)
        self._known = {place: found for place, found in self._known.items() if place in places}
        self._unknown &= set(places)

    def zones(self) -> Mapping[str, str]:
        """Each address, and its zone. What is written down goes before what a name has."""
        written = {place.address: place.zone for place in self._places if not place.is_dns}
        named = {address: place.zone for place in self._places for address in self._known.get(place, ())}
        return {**named, **written}

    async def refresh(self) -> None:
        """Asks for every name, one after the other."""
        for place in [one for one in self._places if one.is_dns]:
            try:
                with anyio.fail_after(_PATIENCE_S):
                    found = await self._resolve(place.host, place.port)
            except (OSError, UnicodeError, TimeoutError) as error:
                self._say_once(place, str(error) or type(error).__name__)
                continue
            if place in self._places and found:  # It may have been taken out while it was resolved.
                self._known[place] = tuple(sorted(found))
                self._unknown.discard(place)

    def _say_once(self, place: EndpointAddress, why: str) -> None:
        if place not in self._unknown:
            self._unknown.add(place)
            _log.warning("%s cannot be resolved, its endpoints stay as they are: %s", place.host, why)
