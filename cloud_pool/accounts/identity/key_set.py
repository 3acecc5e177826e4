"""The public keys that tokens are verified with: a JWKS file (RFC 7517, 8037), several keys at a time.

Rotation: add the new key, wait until every gateway has read it (a second), issue with it, and remove the old key when
its last token has expired. A file that cannot be read leaves the last good keys in place.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from router.errors import ConfigError

CHECK_EVERY_S = 1.0
_KEY_BYTES = 32


class Jwk(msgspec.Struct, frozen=True, omit_defaults=True):
    """One public key. A private part (`d`) is refused: it has no business on a gateway."""

    kid: str
    x: str  # base64url of the 32 bytes
    kty: Literal["OKP"]
    crv: Literal["Ed25519"]
    alg: Literal["EdDSA"] = "EdDSA"
    use: Literal["sig"] = "sig"
    d: str = ""

    def public(self) -> Ed25519PublicKey:
        """Raises ValueError."""
        if self.d:
            raise ValueError(f"the key {self.kid!r} is a private one; only public keys belong here")
        raw = base64.urlsafe_b64decode(self.x + "=" * (-len(self.x) % 4))
        if len(raw) != _KEY_BYTES:
            raise ValueError(f"the key {self.kid!r} has {len(raw)} bytes, not {_KEY_BYTES}")
        return Ed25519PublicKey.from_public_bytes(raw)


class Jwks(msgspec.Struct, frozen=True):
    keys: tuple[Jwk, ...]


def public_jwk(key: Ed25519PublicKey) -> Jwk:
    """Its `kid` is the key's thumbprint (RFC 7638), so the same key always has the same name."""
    x = _unpadded(key.public_bytes_raw())
    canonical = f'{{"crv":"Ed25519","kty":"OKP","x":"{x}"}}'
    return Jwk(kid=_unpadded(hashlib.sha256(canonical.encode()).digest()), x=x, kty="OKP", crv="Ed25519")


def read_jwks(path: Path) -> Jwks:
    """Raises ConfigError."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Jwks)
    except OSError as error:
        raise ConfigError(error.strerror or str(error), where=str(path)) from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"not a set of Ed25519 keys: {error}", where=str(path)) from error
    _parse_keys(found, path)
    return found


def _parse_keys(found: Jwks, path: Path) -> Mapping[str, Ed25519PublicKey]:
    keys: dict[str, Ed25519PublicKey] = {}
    for at, jwk in enumerate(found.keys):
        if jwk.kid in keys:
            raise ConfigError(f"two keys are called {jwk.kid!r}", where=f"{path}: keys[{at}]")
        try:
            keys[jwk.kid] = jwk.public()
        except (ValueError, binascii.Error) as error:
            raise ConfigError(str(error), where=f"{path}: keys[{at}]") from error
    if not keys:
        raise ConfigError("there is no key in the file", where=str(path))
    return keys


class KeySet:
    """Owns the keys in use. `generation` grows with each change; `fault`: why the file's last change is not used."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError: a gateway does not start without keys."""
        self._path = path
        self._seen = self._stamp()
        self._keys = _parse_keys(read_jwks(path), path)
        self._checked_at = float("-inf")
        self.generation = 0
        self.fault = ""

    def get(self, kid: str, now: float) -> Ed25519PublicKey | None:
        """`now` is monotonic, s. The file is looked at once a second at most."""
        self.refresh(now)
        return self._keys.get(kid)

    def refresh(self, now: float) -> None:
        if now - self._checked_at < CHECK_EVERY_S:
            return
        self._checked_at = now
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._keys = _parse_keys(read_jwks(self._path), self._path)
        except ConfigError as error:
            self.fault = error.message
            return
        self.fault = ""
        self.generation += 1

    def _stamp(self) -> tuple[int, int, int]:
        """A rename over the file changes the inode, where time and size may be the same."""
        try:
            status = self._path.stat()
        except OSError:
            return (0, 0, 0)
        return (status.st_ino, status.st_mtime_ns, status.st_size)


def _unpadded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
