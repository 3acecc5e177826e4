"""Claims of a signed token and their checks. The verifier has checked the signature before."""

from __future__ import annotations

from router.errors import AuthenticationFailed

from ...core.principal import ClaimName, Grants, Principal
from .config import IdentityConfig


class Claims(Grants, frozen=True, forbid_unknown_fields=False, kw_only=True):
    """RFC 7519's registered claims and ours, all required, and the grants, which are not. Times are unix, s."""

    iss: str
    aud: str | tuple[str, ...]
    sub: ClaimName  # the device
    tenant: ClaimName
    scope: str  # separated by spaces (RFC 8693)
    jti: ClaimName
    iat: float
    nbf: float
    exp: float

    @property
    def owner(self) -> str:
        """`tenant/device`"""
        return f"{self.tenant}/{self.sub}"

    def principal(self) -> Principal:
        """Return the caller that these claims describe."""
        return Principal(self.tenant, self.sub, frozenset(self.scope.split()), self, self.jti, self.iat)


def check(claims: Claims, config: IdentityConfig, now: float) -> None:
    """Check all claims. `now` is unix time, s. Raises AuthenticationFailed.

    1. Issuer and audience match (RFC 7519 4.1.1, 4.1.3).
    2. The token has not expired and is valid already; clocks may differ by `clock_skew_s` (4.1.4, 4.1.5).
    3. Its lifetime is at most `max_lifetime_s`, and it was not issued in the future.
    """
    if claims.iss != config.issuer:  # (1)
        raise AuthenticationFailed("the token is from another issuer")
    if config.audience not in ((claims.aud,) if isinstance(claims.aud, str) else claims.aud):
        raise AuthenticationFailed("the token is for another service")
    check_time(claims, config, now)  # (2)
    if claims.exp - claims.iat > config.max_lifetime_s:  # (3)
        raise AuthenticationFailed("the token lives longer than is allowed here")
    if claims.iat > now + config.clock_skew_s:
        raise AuthenticationFailed("the token was issued in the future")


def check_time(claims: Claims, config: IdentityConfig, now: float) -> None:
    """Check (2) alone, for a token that was verified before. Raises AuthenticationFailed."""
    # Written so that a time that is no number (NaN) is refused as well.
    if not now < claims.exp + config.clock_skew_s:
        raise AuthenticationFailed("the token has expired")
    if not claims.nbf <= now + config.clock_skew_s:
        raise AuthenticationFailed("the token is not valid yet")
