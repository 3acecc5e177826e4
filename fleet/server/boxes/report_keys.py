"""Keys with which boxes authenticate reports and telemetry, as verifying an Ed25519 signature takes 68 µs, a MAC 3 µs.

A box gets one with each token. The key is derived from this server's secret, the device and the time at which it ends,
which is its id: no process stores it, and a message of another device, or of a later time, has another key.
"""

from __future__ import annotations

import hmac

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from router.bundle.protocol import ReportKey, mac_header

from .refusals import SignatureInvalid, TokenExpired

SKEW_S = 30.0
"""How long a token and its report key are accepted after their end."""


class ReportKeys:
    """Issues report keys and checks messages.

    Args:
        private: The key that signs the tokens. The secret is derived from it: processes that share it agree.
    """

    def __init__(self, private: Ed25519PrivateKey) -> None:
        derivation = HKDF(SHA256(), length=32, salt=None, info=b"causeway report keys")
        self._secret = derivation.derive(private.private_bytes_raw())

    def issue(self, device: str, ends: float) -> ReportKey:
        """Return the key of a device until `ends` (unix, s)."""
        return self._key(device, str(int(ends)))

    def check(self, device: str, mac: str, path: str, body: bytes, now: float) -> None:
        """Check the header `MAC_HEADER` of a message.

        Args:
            device: The device that the message names.
            mac: The header's value.
            path: The path that it was posted to.
            body: The exact bytes.
            now: Unix seconds.

        Raises:
            SignatureInvalid: The device has no such key, or the message is altered.
            TokenExpired: The key has ended.
        """
        key = self._key(device, mac.partition(".")[0])
        if not hmac.compare_digest(mac.encode(errors="replace"), mac_header(key, path, body).encode(errors="replace")):
            raise SignatureInvalid(f"the message is not authenticated by a key of {device!r}")
        if now >= int(key.id) + SKEW_S:
            raise TokenExpired("the report key has ended with its token: ask for a new token, or sign")

    def _key(self, device: str, name: str) -> ReportKey:
        content = f"{name}\n{device}".encode(errors="replace")
        return ReportKey(id=name, key=hmac.digest(self._secret, content, "sha256").hex())
