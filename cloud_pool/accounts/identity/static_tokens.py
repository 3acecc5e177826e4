"""Static bearer tokens, from a file with one per line: a device, its token, and what it is granted.

    kiosk-17  sha256:<64 hex digits>  priority=interactive
    kiosk-18  <token in the clear>  critical=true models=large,small
    # a comment

Only hashes are kept in memory.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from router.errors import AuthenticationFailed, ConfigError

from ...core.principal import Grants

_HASH = re.compile(r"sha256:([0-9a-fA-F]{64})")
_LISTS = ("models", "modalities", "regions")


class StaticToken(msgspec.Struct, frozen=True):
    """A device, the hash of its token, and what it is granted."""

    device: str
    digest: bytes  # sha256, [32]
    grants: Grants = Grants()


class StaticTokens(msgspec.Struct, frozen=True):
    """All static tokens. Without any, every caller on loopback is accepted."""

    known: tuple[StaticToken, ...] = ()

    def find(self, secret: str) -> StaticToken:
        """Return the entry of a bearer token. Raises AuthenticationFailed."""
        digest = hash_token(secret)
        found: StaticToken | None = None
        for token in self.known:  # Compare with all of them: the time taken must not tell which one matches.
            if hmac.compare_digest(token.digest, digest):
                found = token
        if found is None:
            raise AuthenticationFailed("the bearer token is not known here")
        return found


def hash_token(secret: str) -> bytes:
    """Return the digest by which a token is known."""
    return hashlib.sha256(secret.encode(errors="replace")).digest()


def load_tokens(path: Path) -> StaticTokens:
    """Read a token file. Raises ConfigError if it is unreadable, malformed, or empty, which would accept all."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(error), where=str(path)) from error
    tokens = []
    for number, line in enumerate(lines, 1):
        fields = line.partition("#")[0].split()
        if fields:
            tokens.append(_token(fields, f"{path}:{number}"))
    if not tokens:
        raise ConfigError("there is no token in the file", where=str(path))
    return StaticTokens(tuple(tokens))


def _token(fields: Sequence[str], where: str) -> StaticToken:
    """Raises ConfigError."""
    if len(fields) < 2:
        raise ConfigError("write `<device> <token>` or `<device> sha256:<64 hex digits>`", where=where)
    device, secret = fields[:2]
    hashed = _HASH.fullmatch(secret)
    if secret.startswith("sha256:") and not hashed:
        raise ConfigError("sha256: must be followed by 64 hex digits", where=where)
    digest = bytes.fromhex(hashed[1]) if hashed else hash_token(secret)
    return StaticToken(device, digest, _grants(fields[2:], where))


def _grants(words: Sequence[str], where: str) -> Grants:
    """Raises ConfigError."""
    document: dict[str, object] = {}
    for word in words:
        name, is_grant, value = word.partition("=")
        if not is_grant or name in document:
            raise ConfigError(f"{word!r}: after the token write each grant once, as priority=interactive", where=where)
        document[name] = value.split(",") if name in _LISTS else value
    try:
        return msgspec.convert(document, Grants, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error), where=where) from error
