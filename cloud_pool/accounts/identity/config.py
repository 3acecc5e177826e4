"""Configuration of signed tokens."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MAX_TOKEN_LIFETIME_S = 366 * 86400.0
"""Upper bound of `max_lifetime_s` on every gateway: a revoked token may be forgotten after this time."""
WhenRevocationsStale = Literal["allow", "deny"]


class IdentityConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section `identity`: the signed tokens that the gateway accepts.

    `when_revocations_stale`: what a signed token gets while the copy of the revocations is older than
    `revocations_max_age_s`.

    allow   The last copy stays in use, and each such token is counted: an unavailable Redis does not lock out devices.
    deny    503 identity_unavailable: no revoked token is accepted, but no other signed token is either.
    """

    key_file: str = ""  # JWKS; "": no signed tokens
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
    # `allow`: use the stale copy and count it; `deny`: 503 for every signed token
    when_revocations_stale: WhenRevocationsStale = "allow"
