"""Issues valid and forged tokens."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from causeway_server.cloud_pool.accounts.identity.config import IdentityConfig
from causeway_server.cloud_pool.accounts.identity.issuing import new_key, read_private
from causeway_server.cloud_pool.accounts.identity.key_set import public_jwk
from causeway_server.cloud_pool.accounts.identity.token_verifier import KeySet, TokenVerifier

NOW = 1_800_000_000.0  # unix, s
CLAIMS: dict[str, Any] = {
    "iss": "causeway",
    "aud": "causeway-cloud",
    "sub": "kiosk-17",
    "tenant": "acme",
    "scope": "chat jobs",
    "jti": "token-1",
    "iat": NOW,
    "nbf": NOW,
    "exp": NOW + 3600,
}


def part(document: object) -> str:
    data = document if isinstance(document, bytes) else json.dumps(document).encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


class Issuer:
    """A key set in `folder`, and its first private key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key_file = folder / "keys.json"
        self.config = IdentityConfig(key_file=str(self.key_file))
        self.key = self.add("first")

    def add(self, name: str) -> Ed25519PrivateKey:
        private = self.folder / f"{name}.pem"
        new_key(private, self.key_file)
        return read_private(private)

    @staticmethod
    def stranger() -> Ed25519PrivateKey:
        return Ed25519PrivateKey.generate()

    def verifier(self) -> TokenVerifier:
        return TokenVerifier(self.config, KeySet(self.key_file))

    def sign(
        self, claims: object = None, *, key: Ed25519PrivateKey | None = None, head: dict[str, object] | None = None
    ) -> str:
        """Sign a token by hand, so that it can be invalid. `head` and `claims` replace the usual values."""
        key = key or self.key
        usual = {"alg": "EdDSA", "kid": public_jwk(key.public_key()).kid, "typ": "JWT"}
        if isinstance(claims, dict) or claims is None:
            merged = {**CLAIMS, **(claims or {})}
            claims = {name: value for name, value in merged.items() if value is not ...}
        signed = f"{part({**usual, **(head or {})})}.{part(claims)}"
        return f"{signed}.{part(key.sign(signed.encode()))}"
