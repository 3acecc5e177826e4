"""Where a webhook may go. Pure rules over one literal address, applied to the address that is really connected to.

1. what embeds an IPv4 address (mapped, compatible, NAT64, 6to4, Teredo) is refused whatever it embeds: a translator
   on the way could turn it into a private one
2. link-local, loopback, private, shared, multicast, reserved and documentation ranges are refused
3. the allow-list wins over both, for private deployments and tests
"""

from __future__ import annotations

import ipaddress
from typing import Final

from router.errors import ConfigError

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_EMBEDDING: Final = tuple(
    ipaddress.ip_network(text)
    for text in (
        "::ffff:0:0/96",  # mapped
        "::ffff:0:0:0/96",  # translated, RFC 2765
        "::/96",  # compatible
        "64:ff9b::/96",  # NAT64, RFC 6052
        "64:ff9b:1::/48",  # NAT64 of a site, RFC 8215
        "2002::/16",  # 6to4
        "2001::/32",  # Teredo
    )
)
_OTHER: Final = tuple(
    ipaddress.ip_network(text)
    for text in (
        "192.0.0.0/24",  # protocol assignments; which of them count as global depends on Python's patch level
        "2001::/23",
        "3fff::/20",  # documentation
        "192.88.99.0/24",  # 6to4 relays
        "168.63.129.16/32",  # Azure's host: public by its number only
        "fec0::/10",  # site-local, deprecated but routed in old networks
        "5f00::/16",  # segment routing
    )
)


def parse_networks(texts: tuple[str, ...], where: str) -> tuple[Network, ...]:
    """Raises ConfigError."""
    try:
        return tuple(ipaddress.ip_network(text) for text in texts)
    except ValueError as error:
        raise ConfigError(str(error), where=where) from error


def forbidden_reason(text: str, allowed: tuple[Network, ...] = ()) -> str:
    """Why a webhook may not go to this address; "" if it may. What is no address is refused."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return "is no address"
    if any(address in network for network in allowed):  # (3)
        return ""
    if any(address in network for network in _EMBEDDING):  # (1)
        return "embeds an IPv4 address"
    return _special(address)


def _special(address: Address) -> str:
    """(2)"""
    if address.is_multicast:
        return "is multicast"
    if address.is_loopback:
        return "is loopback"
    if address.is_link_local:
        return "is link-local"
    if not address.is_global or address.is_reserved or any(address in network for network in _OTHER):
        return "is private or reserved"
    return ""
