"""The public keys of signed tokens: a JWKS file (RFC 7517, 8037) with one or more keys, and those of a fleet.

Rotation: add the new key, wait until every gateway has read it (a second), issue with it, and remove the old key when
its last token has expired. A file that cannot be read leaves the last good keys in place.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Protocol

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from router.bundle.protocol import base64url, key_id
from router.errors import ConfigError

CHECK_EVERY_S = 1.0
_KEY_BYTES = 32


class Jwk(msgspec.Struct, frozen=True, omit_defaults=True):
    """One public key. A private part (`d`) is refused: a gateway must not hold one."""

    kid: str
    x: str  # base64url of the 32 bytes
    kty: Literal["OKP"]
    crv: Literal["Ed25519"]
    alg: Literal["EdDSA"] = "EdDSA"
    use: Literal["sig"] = "sig"
    d: str = ""

    def public(self) -> Ed25519PublicKey:
        """Return the key. Raises ValueError."""
        if self.d:
            raise ValueError(f"the key {self.kid!r} is a private one; only public keys belong here")
        raw = base64.urlsafe_b64decode(self.x + "=" * (-len(self.x) % 4))
        if len(raw) != _KEY_BYTES:
            raise ValueError(f"the key {self.kid!r} has {len(raw)} bytes, not {_KEY_BYTES}")
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
        raise ConfigError(f"not a set of Ed25519 keys: {error}", where=str(path)) from error
    parse_keys(jwks, str(path))
    return jwks


def parse_keys(jwks: Jwks, source: str) -> Mapping[str, Ed25519PublicKey]:
    """Return the keys by `kid`. `source` names the document in errors. Raises ConfigError."""
    keys: dict[str, Ed25519PublicKey] = {}
    for index, jwk in enumerate(jwks.keys):
        if jwk.kid in keys:
            raise ConfigError(f"two keys are called {jwk.kid!r}", where=f"{source}: keys[{index}]")
        try:
            keys[jwk.kid] = jwk.public()
        except (ValueError, binascii.Error) as error:
            raise ConfigError(str(error), where=f"{source}: keys[{index}]") from error
    if not keys:
        raise ConfigError("there is no key in the file", where=source)
    return keys


class FleetKeys(Protocol):
    """The keys of a fleet's boxes; `revision` grows with each change."""

    @property
    def keys(self) -> Mapping[str, Ed25519PublicKey]: ...
    @property
    def revision(self) -> int: ...


class KeySet:
    """The keys in use: those of the file, then the fleet's.

    `last_error` is why the file's last change is not in use.

    Args:
        path: None for no file
        fleet: None for no fleet

    Raises:
        ConfigError: a gateway does not start without valid keys in its file
    """

    def __init__(self, path: Path | None, fleet: FleetKeys | None = None) -> None:
        self._path = path
        self._fleet = fleet
        self._stamp = self._read_stamp()
        self._keys = {} if path is None else parse_keys(read_jwks(path), str(path))
        self._checked_at = float("-inf")
        self._changes = 0
        self.last_error = ""

    @property
    def revision(self) -> int:
        """Grows with each change."""
        return self._changes if self._fleet is None else self._changes + self._fleet.revision

    def get(self, kid: str, now: float) -> Ed25519PublicKey | None:
        """Return a key by its `kid`, after `refresh`. `now` is monotonic, s."""
        self.refresh(now)
        found = self._keys.get(kid)
        return self._fleet.keys.get(kid) if found is None and self._fleet is not None else found

    def is_fleets(self, kid: str) -> bool:
        """Whether the fleet alone brings this key."""
        return kid not in self._keys and self._fleet is not None and kid in self._fleet.keys

    @property
    def unread(self) -> bool:
        """Whether the fleet's keys have never been read: whose token this is cannot be told yet."""
        return self._fleet is not None and not self._fleet.keys

    def refresh(self, now: float) -> None:
        """Read the file again if it changed, at most once a second. An invalid file leaves the keys as they are."""
        if self._path is None or now - self._checked_at < CHECK_EVERY_S:
            return
        self._checked_at = now
        stamp = self._read_stamp()
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

    def _read_stamp(self) -> tuple[int, int, int]:
        """Return the file's identity. A rename changes the inode, even if time and size stay the same."""
        if self._path is None:
            return (0, 0, 0)
        try:
            status = self._path.stat()
        except OSError:
            return (0, 0, 0)
        return (status.st_ino, status.st_mtime_ns, status.st_size)
