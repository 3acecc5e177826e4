"""Public keys of signed tokens, in the form of a JWKS file (RFC 7517, 8037)."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from causeway_server.router.bundle.protocol import base64url, key_id
from causeway_server.router.errors import ConfigError

_KEY_BYTES = 32


class Jwk(msgspec.Struct, frozen=True, omit_defaults=True):
    """A public key. A private part (`d`) is refused: a gateway must not hold one."""

    kid: str
    x: str  # base64url of the 32 bytes
    kty: Literal["OKP"]
    crv: Literal["Ed25519"]
    alg: Literal["EdDSA"] = "EdDSA"
    use: Literal["sig"] = "sig"
    d: str = ""

    def public(self) -> Ed25519PublicKey:
        """Return the public key. Raises ValueError."""
        if self.d:
            raise ValueError(f"The key {self.kid!r} is private: put only public keys into this file.")
        raw = base64.urlsafe_b64decode(self.x + "=" * (-len(self.x) % 4))
        if len(raw) != _KEY_BYTES:
            raise ValueError(f"The key {self.kid!r} has {len(raw)} bytes, not {_KEY_BYTES}.")
        return Ed25519PublicKey.from_public_bytes(raw)


class Jwks(msgspec.Struct, frozen=True):
    """A JSON Web Key Set."""

    keys: tuple[Jwk, ...]


def public_jwk(key: Ed25519PublicKey) -> Jwk:
    """Return the JWK of a key, named by its thumbprint."""
    x = base64url(key.public_bytes_raw())
    return Jwk(kid=key_id(x), x=x, kty="OKP", crv="Ed25519")


def read_jwks(path: Path) -> Jwks:
    """Read and check a key file. Raises ConfigError."""
    try:
        jwks = msgspec.json.decode(path.read_bytes(), type=Jwks)
    except OSError as error:
        raise ConfigError(error.strerror or str(error), where=str(path)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"The file is not a JWKS of Ed25519 keys: {error}", where=str(path)) from error
    parse_keys(jwks, str(path))
    return jwks


def parse_keys(jwks: Jwks, source: str) -> Mapping[str, Ed25519PublicKey]:
    """Return the keys by `kid`. `source` names the document in errors. Raises ConfigError."""
    keys: dict[str, Ed25519PublicKey] = {}
    for index, jwk in enumerate(jwks.keys):
        if jwk.kid in keys:
            raise ConfigError(f"Two keys have the id {jwk.kid!r}.", where=f"{source}: keys[{index}]")
        try:
            keys[jwk.kid] = jwk.public()
        except (ValueError, binascii.Error) as error:
            raise ConfigError(str(error), where=f"{source}: keys[{index}]") from error
    if not keys:
        raise ConfigError("The file contains no key.", where=source)
    return keys
