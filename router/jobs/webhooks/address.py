"""Where webhooks may be sent: rules over URLs at submission, and over addresses at connect time. Pure.

1. An address that embeds an IPv4 address (mapped, compatible, NAT64, 6to4, Teredo) is refused whatever it embeds: a
   translator on the way could turn it into a private one.
2. Link-local, loopback, private, shared, multicast, reserved and documentation ranges are refused.
3. `allowed_networks` wins over both, for private deployments and tests.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from ...errors import ConfigError, InvalidRequest

MAX_URL = 2048  # characters
_NO_ADDRESS = "is no address"
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
        "192.0.0.0/24",  # protocol assignments; Python's patch level decides which of them count as global
        "2001::/23",
        "3fff::/20",  # documentation
        "192.88.99.0/24",  # 6to4 relays
        "168.63.129.16/32",  # Azure's host: public by its number only
        "fec0::/10",  # site-local, deprecated but routed in old networks
        "5f00::/16",  # segment routing
    )
)


class WebhookRefused(InvalidRequest):
    """Webhooks may not be sent to this URL."""

    code = "webhook_refused"


def allowed_networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Return the networks of `jobs.webhooks.allowed_networks`. Raises ConfigError."""
    try:
        return tuple(ipaddress.ip_network(text) for text in texts)
    except ValueError as error:
        raise ConfigError(str(error), where="jobs.webhooks.allowed_networks") from error


def check_webhook_url(url: str, *, allow_http: bool, allowed: tuple[Network, ...]) -> str:
    """Return `url` if webhooks may be sent to it, as far as that is known before DNS. Raises WebhookRefused."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise WebhookRefused("`webhook` is not a URL", param="webhook") from None
    if len(url) > MAX_URL or not host or not url.isascii() or not url.isprintable() or " " in url or port == 0:
        raise WebhookRefused(f"`webhook` is a URL of at most {MAX_URL} ASCII characters", param="webhook")
    if parts.scheme != "https" and not (allow_http and parts.scheme == "http"):
        schemes = "http:// or https://" if allow_http else "https://"
        raise WebhookRefused(f"`webhook` must begin with {schemes}", param="webhook")
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise WebhookRefused("`webhook` may hold no user, password or fragment", param="webhook")
    reason = forbidden_reason(host, allowed)
    if reason and reason != _NO_ADDRESS:
        raise WebhookRefused(
            f"`webhook` may not be sent to {host}: it {reason}. Name a public host, or have the operator"
            " allow its network (jobs.webhooks.allowed_networks).",
            param="webhook",
        )
    return url


def forbidden_reason(text: str, allowed: tuple[Network, ...] = ()) -> str:
    """Return why no webhook may be sent to this address; "" if it may. A text that is no address is refused."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return _NO_ADDRESS
    if any(address in network for network in allowed):  # (3)
        return ""
    if any(address in network for network in _EMBEDDING):  # (1)
        return "embeds an IPv4 address"
    return _special_range(address)


def _special_range(address: Address) -> str:  # (2)
    if address.is_multicast:
        return "is multicast"
    if address.is_loopback:
        return "is loopback"
    if address.is_link_local:
        return "is link-local"
    if not address.is_global or address.is_reserved or any(address in network for network in _OTHER):
        return "is private or reserved"
    return ""
