"""Configuration of signed tokens."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from causeway_server.router.config import Count, Positive, Seconds, doc
from causeway_server.router.errors import ConfigError
from causeway_server.router.serving.issuers.config import ClaimName, IssuerConfig, check_issuers, check_url

MAX_TOKEN_LIFETIME_S = 366 * 86400.0
"""Upper bound of `max_lifetime_s` on every gateway, and of a client certificate's lifetime: a revocation may be deleted
after this time.
"""
WhenRevocationsStale = Literal["allow", "deny"]


class FleetIdentityConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section `identity.fleet`: the control plane that issues the devices' tokens."""

    url: Annotated[
        str,
        doc("URL of a control plane (`causeway-fleet serve`) whose devices' tokens are also accepted. Empty: none."),
    ] = ""
    tenants: Annotated[
        tuple[ClaimName, ...],
        doc(
            "Tenants whose budgets and data the fleet's devices may use, required with `identity.fleet.url`. Devices "
            "of other tenants are refused."
        ),
    ] = ()
    ca_file: Annotated[str, doc("PEM file of the CAs trusted for `identity.fleet.url`. Empty: the system's CAs.")] = ""
    refresh_s: Annotated[float, Meta(gt=0, le=60), doc("Interval at which keys and revocations are read.")] = 10.0
    copy_file: Annotated[
        str, doc("File for the last copy of keys and revocations, for a start without the control plane. Empty: none.")
    ] = ""

    def check(self) -> None:
        """Check the URL, whose server decides which devices may call us. Raises ConfigError if it is not trusted."""
        if not self.url:
            return
        check_url(self.url, "identity.fleet.url")
        if not self.tenants:
            raise ConfigError(
                "Name the tenants whose budgets the fleet's devices may use: its operators choose a device's tenant.",
                where="identity.fleet.tenants",
            )


class CertificateIdentityConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section `identity.certificates`: callers that a client certificate names (`server.tls.client_ca_file`).

    The certificate's SPIFFE ID `spiffe://FLEET/tenant/TENANT/device/DEVICE`, which a fleet's CA writes, names tenant
    and device; without one the organization and the common name of its subject do.
    """

    tenants: Annotated[
        tuple[ClaimName, ...],
        doc(
            "Tenants whose devices need no token with a client certificate that names them. A signed token beside such "
            "a certificate must be of the same device."
        ),
    ] = ()


class ApiKeysConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section `identity.api_keys`: keys that a tenant's administrators make."""

    accept: Annotated[
        bool, doc("Accept API keys, which callers with the scope `keys` make at `/v1/keys`. Needs `redis`.")
    ] = False
    max_per_tenant: Annotated[Positive, doc("Maximum API keys of one tenant.")] = 100


class IdentityConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section `identity`: the signed tokens that the gateway accepts.

    `when_revocations_stale` applies to signed tokens while the copy of the revocations (of Redis or of the fleet) is
    older than `revocations_max_age_s`. Without any copy they get 503 in both cases, and the gateway is not ready.

    deny    503 identity_unavailable: no revoked token is accepted, but no other signed token is either.
    allow   The last copy stays in use, and each such token is counted: an unavailable Redis does not lock out devices.
    """

    key_file: Annotated[
        str, doc("File with the public keys (JWKS) of signed tokens. Empty: only tokens of `identity.fleet.url`.")
    ] = ""
    issuer: Annotated[str, doc("Accepted `iss` claim.")] = "causeway"
    audience: Annotated[str, doc("Accepted `aud` claim.")] = "causeway-cloud"
    region: Annotated[
        str,
        doc(
            "Region of this gateway. A token whose claim `regions` does not name it gets 403; a request that is bound "
            "to other regions gets 503."
        ),
    ] = ""
    clock_skew_s: Annotated[float, Meta(ge=0, le=300), doc("Accepted clock difference to the issuer.")] = 30.0
    max_lifetime_s: Annotated[
        float,
        Meta(gt=0, le=MAX_TOKEN_LIFETIME_S),
        doc("Maximum lifetime of a token; one with a longer lifetime is refused."),
    ] = 90 * 86400.0
    max_token_bytes: Annotated[
        int, Meta(ge=256, le=16384), doc("Maximum size of a token; larger ones are refused.")
    ] = 4096
    token_cache_size: Annotated[Count, doc("Number of verified tokens that are cached.")] = 10000
    revocations_refresh_s: Annotated[Seconds, doc("Interval at which revocations are read from Redis.")] = 2.0
    revocations_max_age_s: Annotated[Seconds, doc("Age at which the copy of the revocations becomes stale.")] = 60.0
    revocations_file: Annotated[
        str, doc("File for the copy of the revocations, used at start while Redis is unavailable. Empty: none.")
    ] = ""
    when_revocations_stale: Annotated[
        WhenRevocationsStale,
        doc(
            "Response to a stale copy of the revocations. `deny`: every signed token gets 503. `allow`: the copy "
            "stays in use, and its uses are counted."
        ),
    ] = "deny"
    issuers: Annotated[
        tuple[IssuerConfig, ...], doc("OpenID Connect issuers of the owner whose tokens are also accepted.")
    ] = ()
    receipt_key_file: Annotated[
        str,
        doc(
            "Private key that signs the receipts of `DELETE /v1/me/data`, from `causeway-cloud keys new`. Its public "
            "key does not belong into `key_file`. Empty: clients cannot erase."
        ),
    ] = ""
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
