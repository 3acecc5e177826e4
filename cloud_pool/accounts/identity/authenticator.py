"""`Authorization` header -> Principal, for every request.

1. No tokens are configured (loopback only): ANYONE.
2. A bearer token that looks like a JWT, if keys are configured: signature, claims, revocation.
3. Any other bearer token: the static tokens, of the tenant `default`, with `static_scopes`.
4. A token of (2) or (3) that is for other regions is refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from router.errors import AuthenticationFailed

from ...core.principal import ANYONE, DEFAULT_TENANT, Principal
from .revocation import RevocationList
from .static_tokens import StaticTokens
from .token_verifier import TokenVerifier

CALLER_SCOPES = frozenset({"chat", "jobs"})
OPERATOR_SCOPES = frozenset({"admin"})


class Authenticator:
    """Authenticates callers.

    Args:
        verifier, revocations: None for static tokens only
        static_scopes: of each static token
        region: of this gateway
        clock: monotonic time, s
        wall_clock: unix time, s
    """

    def __init__(
        self,
        static: StaticTokens,
        verifier: TokenVerifier | None = None,
        revocations: RevocationList | None = None,
        *,
        static_scopes: frozenset[str] = CALLER_SCOPES,
        region: str = "",
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._static = static
        self._verifier = verifier
        self._revocations = revocations
        self._static_scopes = static_scopes
        self._region = region
        self._clock = clock
        self._wall_clock = wall_clock

    def principal(self, authorization: str) -> Principal:
        """Return the caller.

        Raises:
            AuthenticationFailed: the token is missing, invalid, expired or revoked
            IdentityUnavailable: the copy of the revocations is too old (`when_revocations_stale: deny`)
            PermissionDenied: the token is for other regions
        """
        if self._verifier is None and not self._static.known:  # (1)
            return ANYONE
        scheme, _, token = authorization.partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            raise AuthenticationFailed("send `Authorization: Bearer <token>`")
        if self._verifier is not None and token.startswith("eyJ"):  # (2) `{"` in base64
            claims = self._verifier.verify(token, now=self._clock(), now_unix=self._wall_clock())
            if self._revocations is not None:
                self._revocations.check(claims.owner, claims.jti, claims.iat)
            claims.require_region(self._region)  # (4)
            return claims.principal()
        static = self._static.find(token)  # (3)
        static.grants.require_region(self._region)
        return Principal(DEFAULT_TENANT, static.device, self._static_scopes, static.grants)

    def check_again(self, principal: Principal) -> None:
        """Check a caller that was accepted, while its answer goes on.

        Raises:
            AuthenticationFailed: its token was revoked since
        """
        if principal.token_id and self._revocations is not None:
            self._revocations.check_again(principal.owner, principal.token_id, principal.issued)
