"""An auditor's page: what a tree head of an egress ledger says, and the checks of its proofs (RFC 9162, 2.1).

    leaf  SHA-256(0x00 || record)            node  SHA-256(0x01 || left || right)

A record is a line of the log without its line feed. A tree head is signed by the log's Ed25519 key, over `signed_text`;
a holder of the key may add records, but not change what a head that was noted elsewhere covers. Depends on SHA-256
alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

EMPTY = hashlib.sha256(b"").digest()
"""The root of a tree without leaves."""


def leaf_hash(record: bytes) -> bytes:
    """Return the hash of a record, 32 bytes."""
    return hashlib.sha256(b"\0" + record).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Return the hash of a node, 32 bytes."""
    return hashlib.sha256(b"\1" + left + right).digest()


def log_id(key: bytes) -> str:
    """Return the name of a log, 16 hex digits. `key`: its raw public key."""
    return hashlib.sha256(key).hexdigest()[:16]


def commitment(nonce: bytes, body: bytes) -> str:
    """Return the commitment to a request's bytes, 64 hex digits; it says nothing without the nonce."""
    return hashlib.sha256(nonce + body).hexdigest()


def signed_text(log: str, size: int, root: str, time: float) -> bytes:
    """Return what the signature of a tree head covers. `root`: hex; `time`: Unix seconds."""
    return f"causeway egress ledger\n{log} {size} {root} {time:.3f}".encode()


def includes(record: bytes, index: int, size: int, root: bytes, proof: Sequence[bytes]) -> bool:
    """Return whether `proof` shows that `record` is at `index` of the tree with this size and root (2.1.3.2)."""
    if not 0 <= index < size:
        return False
    found, at, last = leaf_hash(record), index, size - 1
    for step in proof:
        if not last:
            return False
        if at & 1 or at == last:
            found = node_hash(step, found)
            while not at & 1 and at:
                at, last = at >> 1, last >> 1
        else:
            found = node_hash(found, step)
        at, last = at >> 1, last >> 1
    return not last and found == root


def extends(old: int, old_root: bytes, new: int, new_root: bytes, proof: Sequence[bytes]) -> bool:
    """Return whether `proof` shows that the tree `new` begins with the leaves of the tree `old` (2.1.4.2)."""
    if not 0 < old <= new or (old == new) != (not proof):
        return False
    if old == new:
        return old_root == new_root
    steps = [*proof] if old & (old - 1) else [old_root, *proof]
    at, last = old - 1, new - 1
    while at & 1:
        at, last = at >> 1, last >> 1
    first = second = steps[0]
    for step in steps[1:]:
        if not last:
            return False
        if at & 1 or at == last:
            first, second = node_hash(step, first), node_hash(step, second)
            while not at & 1 and at:
                at, last = at >> 1, last >> 1
        else:
            second = node_hash(second, step)
        at, last = at >> 1, last >> 1
    return not last and first == old_root and second == new_root
