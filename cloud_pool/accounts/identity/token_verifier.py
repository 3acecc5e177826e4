"""Token → claims. Refused in this order, each step cheaper than the next:

1. longer than `max_token_bytes`: not even split
2. a head that names another algorithm than EdDSA, an extension that must be understood (`crit`), or no key
3. a key that is not in our set
4. a signature that does not hold
5. claims that are missing, malformed, or not for us, now
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections import OrderedDict

import jwt
import msgspec

from router.errors import AuthenticationFailed

from .claims import Claims, check, check_time
from .config import IdentityConfig
from .key_set import KeySet

ALGORITHM = "EdDSA"
# Times are checked by us, with `now` as an argument; PyJWT would ask the clock itself.
_SIGNATURE_ONLY: jwt.types.Options = {
    "verify_signature": True,
    "verify_exp": False,
    "verify_nbf": False,
    "verify_iat": False,
    "verify_aud": False,
    "verify_iss": False,
    "verify_sub": False,
    "verify_jti": False,
}


class _Head(msgspec.Struct, frozen=True):
    """Of a token's head. `jwk`, `jku`, `x5u`, `x5c`: keys that a stranger sends are not for us to read."""

    alg: str
    kid: str
    crit: msgspec.Raw = msgspec.Raw()


class TokenVerifier:
    """Owns the cache of verified tokens, which holds their hashes and claims. A change of keys empties it."""

    def __init__(self, config: IdentityConfig, keys: KeySet) -> None:
        self._config = config
        self._keys = keys
        self._generation = keys.generation
        self._verified: OrderedDict[bytes, Claims] = OrderedDict()

    def __len__(self) -> int:
        return len(self._verified)

    def verify(self, token: str, *, now: float, now_unix: float) -> Claims:
        """`now` is monotonic, s. Raises AuthenticationFailed."""
        if len(token) > self._config.max_token_bytes:  # (1)
            raise AuthenticationFailed("the token is too long")
        self._keys.refresh(now)
        if self._generation != self._keys.generation:
            self._verified.clear()
            self._generation = self._keys.generation
        digest = hashlib.blake2b(token.encode(errors="replace"), digest_size=32).digest()
        known = self._verified.get(digest)
        if known is not None:
            check_time(known, self._config, now_unix)
            self._verified.move_to_end(digest)
            return known
        claims = self._read(token, now)
        check(claims, self._config, now_unix)
        self._verified[digest] = claims
        while len(self._verified) > self._config.token_cache_size:
            self._verified.popitem(last=False)
        return claims

    def _read(self, token: str, now: float) -> Claims:
        head = _head(token)
        key = self._keys.get(head.kid, now)
        if key is None:  # (3)
            raise AuthenticationFailed("the token's key is not known here")
        try:
            found = jwt.decode_complete(token, key, algorithms=[ALGORITHM], options=_SIGNATURE_ONLY)  # (4)
            return msgspec.convert(found["payload"], Claims)  # (5)
        except jwt.InvalidTokenError as error:
            raise AuthenticationFailed("the token's signature does not hold") from error
        except (msgspec.ValidationError, RecursionError) as error:
            raise AuthenticationFailed(f"the token's claims are not as they should be: {error}") from error


def _head(token: str) -> _Head:
    """Raises AuthenticationFailed. (2)"""
    parts = token.split(".")
    try:
        if len(parts) != 3 or not token.isascii():
            raise ValueError("three parts of letters are needed")
        head = msgspec.json.decode(base64.b64decode(_padded(parts[0]), altchars=b"-_", validate=True), type=_Head)
    except (ValueError, binascii.Error, msgspec.DecodeError, RecursionError) as error:
        raise AuthenticationFailed("the token is no JWT") from error
    if head.alg != ALGORITHM:
        raise AuthenticationFailed(f"tokens are signed with {ALGORITHM} here")
    if bytes(head.crit):
        raise AuthenticationFailed("the token needs an extension that is not known here")
    return head


def _padded(text: str) -> str:
    return text + "=" * (-len(text) % 4)
