"""Configuration of trusted issuers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from ...config import Seconds
from ...errors import ConfigError
from ...web_origins import is_loopback

CLAIM_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z"
"""Names of tenants, devices and regions go into Redis keys, logs and metrics: no separators, no control characters."""
ClaimName = Annotated[str, Meta(pattern=CLAIM_NAME)]


class ClaimsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section `claims` of an issuer: the claims that say what a token may do, by name or as a JSON Pointer."""

    tenant: str = "tenant"
    scopes: str = "scope"
    regions: str = "regions"
    priority: str = "priority"


class IssuerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of `identity.issuers`: an OpenID Connect issuer whose tokens are accepted."""

    issuer: str
    audience: Annotated[str, Meta(min_length=1)]
    tenants: Annotated[tuple[ClaimName, ...], Meta(min_length=1)]
    claims: ClaimsConfig = ClaimsConfig()
    ca_file: str = ""
    refresh_s: Annotated[float, Meta(gt=0, le=3600)] = 300.0
    interval_s: Seconds = 5.0


def check_url(url: str, where: str) -> None:
    """Raise ConfigError if keys that come from `url` could be forged on the way."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(f"The value must be a URL such as https://login.example, not {url!r}.", where=where)
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise ConfigError("Keys sent over plain HTTP can be forged: use https.", where=where)


def check_issuers(issuers: Sequence[IssuerConfig], own: str = "") -> None:
    """Check the issuers. `own`: the `iss` of tokens that are verified by a key file. Raises ConfigError."""
    for index, each in enumerate(issuers):
        where = f"identity.issuers[{index}]"
        check_url(each.issuer, f"{where}.issuer")
        if each.issuer == own or each.issuer in (other.issuer for other in issuers[:index]):
            raise ConfigError(f"The issuer {each.issuer!r} is configured twice.", where=f"{where}.issuer")
        if not each.claims.tenant and len(each.tenants) > 1:
            raise ConfigError(
                "Name one tenant in `tenants`, or name in `claims.tenant` the claim that has the tenant.",
                where=f"{where}.claims.tenant",
            )
