"""Signed token -> claims. A token is refused for, in this order, from cheap to expensive:

1. more than `max_token_bytes`: it is not even split
2. a header with another algorithm than EdDSA, with an extension that must be understood (`crit`), or without a key id
3. a key that is not in the key set; while the fleet's keys have never been read, that is 503
4. an invalid signature
5. claims that are missing, malformed, or not for this gateway at this time
6. the scope `admin` or `keys` under a key of the fleet: a control plane is not an operator of this gateway
7. a tenant under a key of the fleet that `identity.fleet.tenants` does not name: that is 403
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from causeway_server.router.errors import AuthenticationFailed, ConfigError, IdentityUnavailable, PermissionDenied
from causeway_server.router.serving.folders import file_version
from causeway_server.router.serving.issuers.config import ClaimName
from causeway_server.router.serving.issuers.keys import claims_of, read_header

from ...core.principal import Grants, Principal
from .config import IdentityConfig
from .fleet import FleetTrust
from .key_set import parse_keys, read_jwks


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
        """Owner of the token, as `tenant/device`."""
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
        raise AuthenticationFailed("The token is from an issuer that this gateway does not accept.")
    if config.audience not in ((claims.aud,) if isinstance(claims.aud, str) else claims.aud):
        raise AuthenticationFailed("The token is for another service.")
    check_time(claims, config, now)  # (2)
    if claims.exp - claims.iat > config.max_lifetime_s:  # (3)
        raise AuthenticationFailed("The token's lifetime exceeds the maximum of this gateway.")
    if claims.iat > now + config.clock_skew_s:
        raise AuthenticationFailed("The token's time of issue (`iat`) is in the future.")


def check_time(claims: Claims, config: IdentityConfig, now: float) -> None:
    """Check (2) alone, for a token that was verified before. Raises AuthenticationFailed."""
    # NaN fails these comparisons, so it is refused as well.
    if not now < claims.exp + config.clock_skew_s:
        raise AuthenticationFailed("The token has expired.")
    if not claims.nbf <= now + config.clock_skew_s:
        raise AuthenticationFailed("The token is not valid yet.")


ALGORITHM = "EdDSA"
CHECK_EVERY_S = 1.0


class KeySet:
    """The keys in use: those of the file, then the fleet's.

    Rotation: add the new key, wait until every gateway has read it (a second), issue tokens with it, and remove the old
    key when its last token has expired. A file that cannot be read leaves the last valid keys in use; `last_error` is
    the reason. Raises ConfigError if the file has no valid keys at the start.
    """

    def __init__(self, path: Path | None, fleet: FleetTrust | None = None) -> None:
        self._path = path
        self._fleet = fleet
        self._stamp = None if self._path is None else file_version(self._path)
        self._keys = {} if path is None else parse_keys(read_jwks(path), str(path))
        self._checked_at = float("-inf")
        self._changes = 0
        self.last_error = ""

    @property
    def revision(self) -> int:
        """Counter that grows with each change of the keys."""
        return self._changes if self._fleet is None else self._changes + self._fleet.revision

    def get(self, kid: str, now: float) -> Ed25519PublicKey | None:
        """Return a key by its `kid`, after `refresh`. `now`: monotonic seconds."""
        self.refresh(now)
        own_key = self._keys.get(kid)
        return self._fleet.keys.get(kid) if own_key is None and self._fleet is not None else own_key

    def is_fleets(self, kid: str) -> bool:
        """Return whether only the fleet provides this key."""
        return kid not in self._keys and self._fleet is not None and kid in self._fleet.keys

    @property
    def unread(self) -> bool:
        """Whether the fleet's keys have never been read, so that a token's issuer cannot be determined yet."""
        return self._fleet is not None and not self._fleet.keys

    def refresh(self, now: float) -> None:
        """Read the file again if it changed, at most once a second. An invalid file leaves the keys as they are."""
        if self._path is None or now - self._checked_at < CHECK_EVERY_S:
            return
        self._checked_at = now
        stamp = file_version(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = parse_keys(read_jwks(self._path), str(self._path))
        except ConfigError as error:
            self.last_error = error.message
            return
        self.last_error = ""
        self._changes += 1


class TokenVerifier:
    """Verifier of signed tokens. Hashes and claims of verified tokens are cached until the keys change."""

    def __init__(self, config: IdentityConfig, keys: KeySet) -> None:
        self._config = config
        self._keys = keys
        self._key_revision = keys.revision
        self._verified: OrderedDict[bytes, Claims] = OrderedDict()

    def __len__(self) -> int:
        return len(self._verified)

    def verify(self, token: str, *, now: float, now_unix: float) -> Claims:
        """Return the claims of a token. `now`: monotonic seconds; `now_unix`: Unix time in seconds.

        Raises:
            AuthenticationFailed: The token is refused.
            IdentityUnavailable: The key may be the fleet's, whose keys have never been read.
            PermissionDenied: The fleet may not use the token's tenant.
        """
        if len(token) > (most := self._config.max_token_bytes):  # (1)
            raise AuthenticationFailed(f"The token has {len(token)} bytes; at most {most} are accepted.")
        self._keys.refresh(now)
        if self._key_revision != self._keys.revision:
            self._verified.clear()
            self._key_revision = self._keys.revision
        digest = hashlib.blake2b(token.encode(errors="replace"), digest_size=32).digest()
        verified = self._verified.get(digest)
        if verified is not None:
            check_time(verified, self._config, now_unix)
            self._verified.move_to_end(digest)
            return verified
        claims = self._read(token, now)
        check(claims, self._config, now_unix)
        self._verified[digest] = claims
        while len(self._verified) > self._config.token_cache_size:
            self._verified.popitem(last=False)
        return claims

    def _read(self, token: str, now: float) -> Claims:
        header = read_header(token)
        if header.alg != ALGORITHM or header.kid is None:  # (2)
            raise AuthenticationFailed(f"A token must be signed with {ALGORITHM} and name its key (`kid`).")
        key = self._keys.get(header.kid, now)
        if key is None:  # (3)
            if self._keys.unread:
                raise IdentityUnavailable("This gateway has not read the fleet's keys yet.", retry_after_s=5.0)
            raise AuthenticationFailed("The key that signed the token is unknown.")
        payload = claims_of(token, key, ALGORITHM)
        if payload is None:  # (4)
            raise AuthenticationFailed("The token's signature is invalid.")
        try:
            claims = msgspec.convert(payload, Claims)  # (5)
        except (msgspec.ValidationError, RecursionError) as error:
            raise AuthenticationFailed(f"The token's claims are invalid: {error}") from error
        if self._keys.is_fleets(header.kid) and not {"admin", "keys"}.isdisjoint(claims.scope.split()):  # (6)
            raise AuthenticationFailed(
                "A token of the fleet's control plane cannot have the scopes `admin` and `keys`."
            )
        if self._keys.is_fleets(header.kid) and claims.tenant not in self._config.fleet.tenants:  # (7)
            raise PermissionDenied(
                f"The fleet's devices may not use the tenant {claims.tenant!r} on this gateway. The gateway's "
                "operator lists the tenants that they may use in `identity.fleet.tenants`."
            )
        return claims
