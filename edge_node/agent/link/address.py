"""The address of a control plane: where tokens may be sent, and whose certificates are trusted there."""

from __future__ import annotations

import ssl
from urllib.parse import urlsplit

from router.addresses import is_loopback
from router.errors import ConfigError


def checked_url(url: str) -> str:
    """Return the URL without a slash at its end.

    Raises:
        ConfigError: Not https, except on loopback: the join token and the bearer tokens travel there.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"must be a URL like https://fleet.example, not {url!r}", where="fleet URL")
    if not carries_secrets(url):
        raise ConfigError("tokens over plain HTTP could be stolen: use https://", where="fleet URL")
    return url.rstrip("/")


def carries_secrets(url: str) -> bool:
    """Return whether a token may be sent to a URL: https, or loopback."""
    parts = urlsplit(url)
    if parts.scheme == "https":
        return True
    return is_loopback(parts.hostname or "")


def tls_context(ca_file: str) -> ssl.SSLContext | bool:
    if not ca_file:
        return True
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise ConfigError(f"{error.strerror or error}", where=ca_file) from error
