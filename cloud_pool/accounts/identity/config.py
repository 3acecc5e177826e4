"""Configuration of signed tokens."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from causeway_server.router.config import Count, Positive, Seconds
from causeway_server.router.errors import ConfigError
from causeway_server.router.serving.issuers.config import ClaimName, IssuerConfig, check_issuers, check_url

MAX_TOKEN_LIFETIME_S = 366 * 86400.0
"""Upper bound of `max_lifetime_s` on every gateway, and of a client certificate's lifetime: a revocation may be deleted
after this time.
"""
WhenRevocationsStale = Literal["allow", "deny"]


class FleetIdentityConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section `identity.fleet`: the control plane that issues the devices' tokens."""

    url: str = ""
    tenants: tuple[ClaimName, ...] = ()
    ca_file: str = ""
    refresh_s: Annotated[float, Meta(gt=0, le=60)] = 10.0
    copy_file: str = ""

    def check(self) -> None:
        """Check the URL, whose server decides which devices may call us. Raises ConfigError if it is not trusted."""
        if not self.url:
            return
        check_url(self.url, "identity.fleet.url")
        if not self.tenants:
            raise ConfigError(
                "List the tenants whose budgets the fleet's devices may use. Without this list, the fleet's "
                "operators could choose any tenant for a device.",
                where="identity.fleet.tenants",
            )


class CertificateIdentityConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section `identity.certificates`: callers that a client certificate names (`server.tls.client_ca_file`).

    The certificate's SPIFFE ID `spiffe://FLEET/tenant/TENANT/device/DEVICE`, which a fleet's CA writes, names tenant
    and device; without one the organization and the common name of its subject do.
    """

    tenants: tuple[ClaimName, ...] = ()


class ApiKeysConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section `identity.api_keys`: keys that a tenant's administrators make."""

    accept: bool = False
    max_per_tenant: Positive = 100


class IdentityConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section `identity`: the signed tokens that the gateway accepts.

    `when_revocations_stale` applies to signed tokens while the copy of the revocations (of Redis or of the fleet) is
    older than `revocations_max_age_s`. Without any copy they get 503 in both cases, and the gateway is not ready.

    deny    503 identity_unavailable: no revoked token is accepted, but no other signed token is either.
    allow   The last copy stays in use, and each such token is counted: an unavailable Redis does not lock out devices.
    """

    key_file: str = ""
    issuer: str = "causeway"
    audience: str = "causeway-cloud"
    region: str = ""
    clock_skew_s: Annotated[float, Meta(ge=0, le=300)] = 30.0
    max_lifetime_s: Annotated[float, Meta(gt=0, le=MAX_TOKEN_LIFETIME_S)] = 90 * 86400.0
    max_token_bytes: Annotated[int, Meta(ge=256, le=16384)] = 4096
    token_cache_size: Count = 10000
    revocations_refresh_s: Seconds = 2.0
    revocations_max_age_s: Seconds = 60.0
    revocations_file: str = ""
    when_revocations_stale: WhenRevocationsStale = "deny"
    issuers: tuple[IssuerConfig, ...] = ()
    receipt_key_file: str = ""
    fleet: FleetIdentityConfig = FleetIdentityConfig()
    certificates: CertificateIdentityConfig = CertificateIdentityConfig()
    api_keys: ApiKeysConfig = ApiKeysConfig()

    @property
    def signed(self) -> bool:
        """Whether signed tokens or API keys are accepted."""
        return bool(self.key_file or self.fleet.url or self.issuers or self.api_keys.accept)

    def check(self) -> None:
        """Check the URLs from which keys come. Raises ConfigError."""
        self.fleet.check()
        check_issuers(self.issuers, self.issuer if self.key_file else "")
