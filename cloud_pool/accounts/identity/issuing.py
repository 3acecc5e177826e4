"""Creation of keys and tokens. Private keys stay where tokens are issued, never on a gateway."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path

import jwt
import msgspec
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from causeway_server.router.errors import ConfigError
from causeway_server.router.serving.folders import write_atomically

from ...core.principal import NO_GRANTS, Grants
from .key_set import Jwk, Jwks, public_jwk, read_jwks
from .token_verifier import ALGORITHM, Claims


def new_key(private_file: Path, key_file: Path) -> Jwk:
    """Write a new private key (mode 0600), never over an existing one, and add its public half. Raises ConfigError."""
    private = Ed25519PrivateKey.generate()
    jwk = public_jwk(private.public_key())
    known = read_jwks(key_file).keys if key_file.exists() else ()
    pem = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        handle = os.open(private_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(pem)
    except OSError as error:
        raise ConfigError(error.strerror or str(error), where=str(private_file)) from error
    write_jwks(key_file, Jwks((*known, jwk)))
    return jwk


def remove_key(key_file: Path, kid: str) -> None:
    """Remove a key, so that its tokens are refused. Raises ConfigError if it is unknown or the last one."""
    known = read_jwks(key_file).keys
    kept = tuple(key for key in known if key.kid != kid)
    if len(kept) == len(known):
        raise ConfigError(f"The file has no key {kid!r}.", where=str(key_file))
    if not kept:
        raise ConfigError("The only key of a file cannot be removed. Add another key first.", where=str(key_file))
    write_jwks(key_file, Jwks(kept))


def write_jwks(path: Path, keys: Jwks) -> None:
    """Replace the key set atomically by rename. Raises ConfigError."""
    document = {
        "keys": [{"kid": k.kid, "kty": k.kty, "crv": k.crv, "alg": k.alg, "use": k.use, "x": k.x} for k in keys.keys]
    }
    try:
        write_atomically(path, msgspec.json.format(msgspec.json.encode(document)) + b"\n")
    except OSError as error:
        raise ConfigError(error.strerror or str(error), where=str(path)) from error


def read_private(path: Path) -> Ed25519PrivateKey:
    """Read a private key. Raises ConfigError."""
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise ConfigError(error.strerror or str(error), where=str(path)) from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        reason = "The file is not an unencrypted private key in PEM, as `causeway-cloud keys new` writes it."
        raise ConfigError(reason, where=str(path)) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError("The file does not contain an Ed25519 key.", where=str(path))
    return key


def issue(
    key: Ed25519PrivateKey,
    *,
    tenant: str,
    device: str,
    scopes: Iterable[str],
    grants: Grants = NO_GRANTS,
    issuer: str,
    audience: str,
    now: float,
    lifetime_s: float,
) -> tuple[str, Claims]:
    """Sign a token that is valid from `now` (unix, s). Raises ConfigError for names that no gateway accepts."""
    document = {
        **msgspec.to_builtins(grants),
        "iss": issuer,
        "aud": audience,
        "sub": device,
        "tenant": tenant,
        "scope": " ".join(scopes),
        "jti": secrets.token_hex(12),
        "iat": int(now),
        "nbf": int(now),
        "exp": int(now + lifetime_s),
    }
    try:
        claims = msgspec.convert(document, Claims)
    except msgspec.ValidationError as error:
        allowed = "Names have 1 to 64 letters, digits, `.`, `_` and `-`, and begin with a letter or digit."
        raise ConfigError(f"A gateway would refuse this token: {error}. {allowed}") from error
    kid = public_jwk(key.public_key()).kid
    return jwt.encode(document, key, algorithm=ALGORITHM, headers={"kid": kid}), claims
