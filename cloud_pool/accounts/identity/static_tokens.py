"""Static bearer tokens, from a file with one per line.

    kiosk-17  sha256:2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae
    kiosk-18  a-token-in-the-clear
    # a comment

Only hashes are kept in memory.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from pathlib import Path

import msgspec

from router.errors import AuthenticationFailed, ConfigError

_HASH = re.compile(r"sha256:([0-9a-fA-F]{64})")


class StaticToken(msgspec.Struct, frozen=True):
    """A device and the hash of its token."""

    device: str
    digest: bytes  # sha256, [32]


class StaticTokens(msgspec.Struct, frozen=True):
    """All static tokens. Without any, every caller on loopback is accepted."""

    known: tuple[StaticToken, ...] = ()

    def device(self, authorization: str) -> str:
        """Return the device whose token the header holds; "" if no tokens are configured.

        Raises AuthenticationFailed.
        """
        if not self.known:
            return ""
        scheme, _, secret = authorization.partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            raise AuthenticationFailed("send `Authorization: Bearer <token>`")
        digest = hashlib.sha256(secret.strip().encode()).digest()
        device = ""
        for token in self.known:  # Compare with all of them: the time taken must not tell which one matches.
            if hmac.compare_digest(token.digest, digest):
                device = token.device
        if not device:
            raise AuthenticationFailed("the bearer token is not known here")
        return device


def load_tokens(path: Path) -> StaticTokens:
    """Read a token file. Raises ConfigError if it is unreadable, malformed, or empty, which would accept all."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(error), where=str(path)) from error
    tokens = []
    for number, line in enumerate(lines, 1):
        fields = line.partition("#")[0].split()
        if not fields:
            continue
        if len(fields) != 2:
            raise ConfigError("write `<device> <token>` or `<device> sha256:<64 hex digits>`", where=f"{path}:{number}")
        device, secret = fields
        hashed = _HASH.fullmatch(secret)
        if secret.startswith("sha256:") and not hashed:
            raise ConfigError("sha256: must be followed by 64 hex digits", where=f"{path}:{number}")
        digest = bytes.fromhex(hashed[1]) if hashed else hashlib.sha256(secret.encode()).digest()
        tokens.append(StaticToken(device, digest))
    if not tokens:
        raise ConfigError("there is no token in the file", where=str(path))
    return StaticTokens(tuple(tokens))
