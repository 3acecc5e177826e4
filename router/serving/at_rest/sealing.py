"""The form of encrypted content at rest, of gateways and devices: AES-256-GCM (NIST SP 800-38D).

A sealed value is MAGIC, the length of the key's id, that id, a random nonce of 12 bytes, and the ciphertext with its
tag of 16 bytes. The tag also covers the value's place, such as its table and row, so that a value moved to another
place cannot be opened. JSON, msgpack and text never begin with MAGIC.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Final

from ...errors import RecordUnreadable

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

MAGIC: Final = b"\x00CWJ1"
KEY_BYTES: Final = 32
_NONCE_BYTES = 12
_TAG_BYTES = 16
_DRAWN = 256  # nonces
_nonces: list[bytes] = []  # to use; each once
os.register_at_fork(after_in_child=_nonces.clear)


def head_of(key_id: str) -> bytes:
    """Return the bytes with which the values of a key begin."""
    return MAGIC + bytes([len(key_id)]) + key_id.encode()


def sealed_bytes(key_id: str) -> int:
    """Return by how many bytes a sealed value is longer than its content."""
    return len(head_of(key_id)) + _NONCE_BYTES + _TAG_BYTES


def key_id_of(stored: bytes) -> str:
    """Return the id of the key of a sealed value; "" if the value is not sealed."""
    if not stored.startswith(MAGIC):
        return ""
    begin = len(MAGIC) + 1
    return stored[begin : begin + (stored[begin - 1] if len(stored) >= begin else 0)].decode("ascii", "replace")


class Sealer:
    """Seals and opens values with keys of 32 bytes, by id. The first one imports `cryptography`, some megabytes."""

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        self._keys = dict(keys)

    def __contains__(self, key_id: str) -> bool:
        return key_id in self._keys

    @cached_property
    def _ciphers(self) -> dict[str, tuple[bytes, AESGCM]]:
        """The head of each key's values, and its cipher."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return {key_id: (head_of(key_id), AESGCM(key)) for key_id, key in self._keys.items()}

    def seal(self, key_id: str, data: bytes, *place: str) -> bytes:
        """Seal a value for a place."""
        head, cipher = self._ciphers[key_id]
        nonce = _nonce()
        return head + nonce + cipher.encrypt(nonce, data, _bound(head, place))

    def open(self, stored: bytes, *place: str) -> bytes:
        """Open a value sealed for the same place, with a known key. RecordUnreadable: also if it was modified."""
        from cryptography.exceptions import InvalidTag

        try:
            head, cipher = self._ciphers[key_id_of(stored)]
            nonce, rest = stored[len(head) : len(head) + _NONCE_BYTES], stored[len(head) + _NONCE_BYTES :]
            return cipher.decrypt(nonce, rest, _bound(head, place))
        except (InvalidTag, KeyError, ValueError):
            raise RecordUnreadable("Encrypted content was modified, or belongs to another record.") from None


def _nonce() -> bytes:
    """Return a random nonce. Many are drawn at once, as each draw hands the interpreter's lock to another thread."""
    try:
        return _nonces.pop()
    except IndexError:
        drawn = os.urandom(_DRAWN * _NONCE_BYTES)
        _nonces.extend([drawn[at : at + _NONCE_BYTES] for at in range(_NONCE_BYTES, len(drawn), _NONCE_BYTES)])
        return drawn[:_NONCE_BYTES]


def _bound(head: bytes, place: tuple[str, ...]) -> bytes:
    """Return the additional data that the tag covers."""
    return head + "\0".join(place).encode()
