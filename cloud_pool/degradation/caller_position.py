"""Where callers stand in the line for a tier of which there is not enough for all. Pure."""

from __future__ import annotations

import hashlib

_BYTES = 8


def caller_position(tenant: str, client: str, conversation: bytes) -> float:
    """0 to 1, the same at every gateway: of a device, and of a conversation where nobody says which device asks."""
    caller = f"{tenant}/{client}".encode() if client else conversation
    return int.from_bytes(hashlib.blake2b(caller, digest_size=_BYTES).digest(), "big") / 256.0**_BYTES
