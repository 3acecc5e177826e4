"""Addresses to listen on and to connect to."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Return whether only programs of this machine reach `host`. An unknown name and "" (all addresses) are not."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
