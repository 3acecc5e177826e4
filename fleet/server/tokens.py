"""Credentials of devices: tokens, and keys with which they authenticate reports and telemetry.

Tokens are JWTs, signed with this server's key, which the control plane and the cloud gateways accept. A device gets a
report key with each token, because verifying an Ed25519 signature takes 68 µs, a MAC 3 µs.
"""

from __future__ import annotations

import hmac
import secrets
from contextlib import suppress
from pathlib import Path

import jwt
import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from jwt.algorithms import OKPAlgorithm

from causeway_server.router.bundle.protocol import ReportKey, base64url, key_id, mac_header
from causeway_server.router.errors import AuthenticationFailed, ConfigError
from causeway_server.router.serving.folders import write_new

from .refusals import SignatureInvalid, TokenExpired

SKEW_S = 30.0
"""The time for which a token and its report key are still accepted after they end, in seconds."""
TOKEN_S = 600.0
TO_GATEWAYS, TO_FLEET = "causeway-cloud", "causeway-fleet"
_SCOPE = "chat jobs"
_ALGORITHM = "EdDSA"
_REQUIRED = ["iss", "aud", "sub", "tenant", "scope", "jti", "iat", "nbf", "exp"]


class ReportKeys:
    """Issues report keys and checks messages. A key is derived from this server's secret, the device and the time at
    which the key ends (its id), so it need not be stored.

    The secret is derived from `private`, which signs the tokens, so that all processes agree.
    """

    def __init__(self, private: Ed25519PrivateKey) -> None:
        derivation = HKDF(SHA256(), length=32, salt=None, info=b"causeway report keys")
        self._secret = derivation.derive(private.private_bytes_raw())

    def issue(self, device: str, ends: float) -> ReportKey:
        """Return the key of a device until `ends` (unix, s)."""
        return self._key(device, str(int(ends)))

    def check(self, device: str, mac: str, path: str, body: bytes, now: float) -> None:
        """Check the header `MAC_HEADER` of a message. Raises SignatureInvalid, TokenExpired. `now`: Unix s."""
        key = self._key(device, mac.partition(".")[0])
        if not hmac.compare_digest(mac.encode(errors="replace"), mac_header(key, path, body).encode(errors="replace")):
            raise SignatureInvalid(f"The message is not authenticated by a key of {device!r}.")
        if now >= int(key.id) + SKEW_S:
            raise TokenExpired("The report key has expired with its token. Request a new token, or sign the message.")

    def _key(self, device: str, name: str) -> ReportKey:
        content = f"{name}\n{device}".encode(errors="replace")
        return ReportKey(id=name, key=hmac.digest(self._secret, content, "sha256").hex())


class TokenKey:
    """The key that signs and verifies tokens. `issuer`: the claim `iss`, which the gateways expect.

    `jwks` is its public half for the gateways, `report_keys` the keys of the devices' reports, derived from it.
    """

    def __init__(self, key: Ed25519PrivateKey, issuer: str) -> None:
        self._private = key
        self.report_keys = ReportKeys(key)
        self._public = key.public_key()
        self._issuer = issuer
        x = base64url(self._public.public_bytes_raw())
        self._kid = key_id(x)
        public = {"kid": self._kid, "kty": "OKP", "crv": "Ed25519", "alg": _ALGORITHM, "use": "sig", "x": x}
        self.jwks = msgspec.json.encode({"keys": [public]})

    def issue(self, device: str, tenant: str, now: float) -> str:
        """Return a token that is valid for `TOKEN_S` from `now` (unix, s)."""
        claims = {
            "iss": self._issuer,
            "aud": [TO_GATEWAYS, TO_FLEET],
            "sub": device,
            "tenant": tenant,
            "scope": _SCOPE,
            "jti": secrets.token_hex(12),
            "iat": int(now),
            "nbf": int(now),
            "exp": int(now + TOKEN_S),
        }
        return jwt.encode(claims, self._private, algorithm=_ALGORITHM, headers={"kid": self._kid})

    def device_of(self, authorization: str, now: float) -> str:
        """Return the device that an `Authorization` header names ("": none). `now`: Unix seconds.

        Raises AuthenticationFailed without a bearer token of this key, TokenExpired.
        """
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise AuthenticationFailed("Send `Authorization: Bearer <token>`. POST /v1/token issues tokens.")
        try:
            claims = jwt.decode(
                token.strip(),
                self._public,
                algorithms=[_ALGORITHM],
                audience=TO_FLEET,
                issuer=self._issuer,
                # Expiry is checked below, against `now`.
                options={"verify_exp": False, "verify_nbf": False, "verify_iat": False, "require": _REQUIRED},
            )
        except jwt.PyJWTError as error:
            raise AuthenticationFailed(f"The token was not issued by this control plane: {error}.") from error
        if not now < float(claims["exp"]) + SKEW_S:
            raise TokenExpired("The token has expired. Request a new one.")
        return str(claims["sub"])


def load_token_key(path: Path, issuer: str) -> TokenKey:
    """Read the private key, a JWK, or create one (mode 0600). Raises ConfigError, also if others can read it."""
    try:
        if not path.exists():
            with suppress(FileExistsError):  # another process created the file first
                jwk = OKPAlgorithm.to_jwk(Ed25519PrivateKey.generate(), as_dict=True)
                write_new(path, msgspec.json.encode(jwk), 0o600)
        if path.stat().st_mode & 0o077:
            raise ConfigError("Other accounts can read the file. Run chmod 600 on the file.", where=str(path))
        key = OKPAlgorithm.from_jwk(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(error.strerror or str(error), where=str(path)) from error
    except (ValueError, jwt.InvalidKeyError) as error:
        raise ConfigError(f"The file is not an Ed25519 key as a JWK: {error}.", where=str(path)) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError("The file is not a private Ed25519 key.", where=str(path))
    return TokenKey(key, issuer)
