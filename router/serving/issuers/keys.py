"""Public keys as a JWKS has them (RFC 7517, 7518, 8037), and the signatures of tokens by them.

An algorithm belongs to the type of the key, never to the token alone: `none` and HMAC do not exist here. RSA has 2048
to 8192 bits. Keys of other types, for encryption, or with a private part, which no issuer publishes, are left out.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Final

import jwt
import msgspec
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from ...errors import AuthenticationFailed

_MAX_KEYS: Final = 64
_RSA_BITS: Final = range(2048, 8193)
_ALGORITHMS: Final = {
    "RSA": ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    "P-256": ("ES256",),
    "P-384": ("ES384",),
    "P-521": ("ES512",),
    "Ed25519": ("EdDSA",),
}
"""The algorithms of each key type or curve."""
_TYPES: Final = ("", "jwt", "at+jwt", "application/at+jwt")
_SIGNATURES: Final = jwt.PyJWS()  # whose readers check the claims, with `now` as an argument


class TokenHeader(msgspec.Struct, frozen=True):
    """A token's header. `jwk`, `jku`, `x5u` and `x5c` are ignored: a caller cannot bring its own key."""

    alg: str
    kid: str | None = None
    typ: str = ""
    crit: msgspec.Raw = msgspec.Raw()


class PublicKey(msgspec.Struct, frozen=True):
    """A key and the algorithms that it may verify."""

    kid: object
    algorithms: tuple[str, ...]
    key: Any


def parse_jwks(content: bytes) -> tuple[PublicKey, ...]:
    """Return the usable keys of a JWKS. Raises ValueError if there are none, or too many."""
    found = msgspec.json.decode(content, type=dict[str, list[dict[str, Any]]]).get("keys", [])
    keys = [key for jwk in found[: _MAX_KEYS + 1] if (key := _public_key(jwk)) is not None]
    if not keys or len(found) > _MAX_KEYS:
        raise ValueError(f"The key set has {len(found)} keys, of which {len(keys)} can verify signatures.")
    return tuple(keys)


def _public_key(jwk: dict[str, Any]) -> PublicKey | None:
    """Return a key; None if it is of no use here."""
    kind, named = str(jwk.get("crv") or jwk.get("kty")), jwk.get("alg", "")
    algorithms = tuple(name for name in _ALGORITHMS.get(kind, ()) if named in ("", name, kind))
    if not algorithms or jwk.get("use", "sig") != "sig" or "d" in jwk:
        return None
    try:
        key = jwt.PyJWK(jwk, algorithms[0]).key
    except (jwt.PyJWTError, ValueError, TypeError, KeyError):
        return None
    if isinstance(key, RSAPublicKey) and key.key_size not in _RSA_BITS:
        return None
    return PublicKey(jwk.get("kid"), algorithms, key)


def read_header(token: str) -> TokenHeader:
    """Decode a token's header, which nothing protects yet. Raises AuthenticationFailed."""
    try:
        if token.count(".") != 2 or not token.isascii():
            raise ValueError("The token is not a JWT, because a JWT has three parts.")
        header = msgspec.json.decode(_part(token, 0), type=TokenHeader)
    except (ValueError, RecursionError) as error:  # also those of base64 and msgspec
        raise AuthenticationFailed("The token is not a JWT.") from error
    if bytes(header.crit):
        raise AuthenticationFailed("The token requires an extension that this server does not support.")
    if header.typ.lower() not in _TYPES:
        raise AuthenticationFailed(f"A token of the type {header.typ[:32]!r} is not for this service.")
    return header


def read_issuer(token: str) -> str:
    """Return the claim `iss`, which nothing protects yet; "" if there is none."""
    try:
        return str(msgspec.json.decode(_part(token, 1), type=dict[str, Any]).get("iss", ""))
    except (ValueError, IndexError, RecursionError):
        return ""


def verified_claims(token: str, header: TokenHeader, keys: Sequence[PublicKey]) -> dict[str, Any] | None:
    """Return the claims of a token signed by one of the keys; without a key's name, if only one can have signed it."""
    fitting = [key for key in keys if header.alg in key.algorithms and header.kid in (key.kid, None)]
    if header.kid is None and len(fitting) > 1:
        return None
    return next((claims for key in fitting if (claims := claims_of(token, key.key, header.alg)) is not None), None)


def claims_of(token: str, key: Any, algorithm: str) -> dict[str, Any] | None:
    """Return the claims of a token; None if this key has not signed it."""
    try:
        payload = _SIGNATURES.decode(token, key, algorithms=[algorithm])
        return msgspec.json.decode(payload, type=dict[str, Any])
    except (jwt.PyJWTError, ValueError, RecursionError):
        return None


def _part(token: str, index: int) -> bytes:
    part = token.split(".")[index]
    return base64.b64decode(part + "=" * (-len(part) % 4), altchars=b"-_", validate=True)
