"""Configuration of signed tokens."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from causeway_server.router.errors import ConfigError
from causeway_server.router.web_origins import is_loopback

from ...core.principal import ClaimName

MAX_TOKEN_LIFETIME_S = 366 * 86400.0
"""Upper bound of `max_lifetime_s` on every gateway: a revoked token may be forgotten after this time."""
WhenRevocationsStale = Literal["allow", "deny"]


class FleetIdentityConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section `identity.fleet`: the control plane that issues the devices' tokens."""

    url: str = ""  # of a control plane (`causeway-fleet serve`), whose devices' tokens are accepted too; "": none
    # tenants whose budgets and data the fleet's devices may use, required with `url`; a device of another is refused
    tenants: tuple[ClaimName, ...] = ()
    ca_file: str = ""  # PEM certificates of the authorities that are trusted for `url`; "": the system's
    refresh_s: Annotated[float, Meta(gt=0, le=60)] = 10.0  # how often its keys and revocations are read
    copy_file: str = ""  # the last copy on disk, for a start while the control plane is away; "": none

    def check(self) -> None:
        """Raises ConfigError for a URL that cannot be trusted: its server decides which devices may call us."""
        if not self.url:
            return
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"must be a URL like https://fleet.example, not {self.url!r}", where="identity.fleet.url")
        if parts.scheme == "http" and not is_loopback(parts.hostname):
            raise ConfigError("keys over plain HTTP could be forged: use https://", where="identity.fleet.url")
        if not self.tenants:
            raise ConfigError(
                "Name the tenants whose budgets the fleet's devices may use: its operators choose a device's tenant.",
                where="identity.fleet.tenants",
            )


class IdentityConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section `identity`: the signed tokens that the gateway accepts.

    `when_revocations_stale`: what a signed token gets while the copy of the revocations is older than
    `revocations_max_age_s`, that of Redis or that of the fleet. Without any copy it gets 503 in both cases, and the
    gateway is not ready.

    deny    503 identity_unavailable: no revoked token is accepted, but no other signed token is either.
    allow   The last copy stays in use, and each such token is counted: an unavailable Redis does not lock out devices.
    """

    key_file: str = ""  # JWKS; "": no signed tokens but those of `fleet.url`
    issuer: str = "causeway"  # accepted `iss` claim
    audience: str = "causeway-cloud"  # accepted `aud` claim
    region: str = ""  # of this gateway: a token whose claim `regions` does not name it gets 403
    clock_skew_s: Annotated[float, Meta(ge=0, le=300)] = 30.0  # between the issuer's clock and the gateway's
    max_lifetime_s: Annotated[float, Meta(gt=0, le=MAX_TOKEN_LIFETIME_S)] = 90 * 86400.0  # longer ones are refused
    max_token_bytes: Annotated[int, Meta(ge=256, le=16384)] = 4096  # a longer token is refused
    token_cache_size: Annotated[int, Meta(ge=0)] = 10000  # verified tokens that are remembered
    revocations_refresh_s: Annotated[float, Meta(gt=0)] = 2.0  # how often Redis is read
    revocations_max_age_s: Annotated[float, Meta(gt=0)] = 60.0  # an older copy of the revocations is stale
    revocations_file: str = ""  # the copy on disk, for a start while Redis is unavailable; "": none
    # `deny`: 503 for every signed token; `allow`: use the stale copy and count it
    when_revocations_stale: WhenRevocationsStale = "deny"
    fleet: FleetIdentityConfig = FleetIdentityConfig()

    @property
    def signed(self) -> bool:
        """Whether signed tokens are accepted."""
        return bool(self.key_file or self.fleet.url)
