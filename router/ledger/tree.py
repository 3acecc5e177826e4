"""The Merkle tree of a log (RFC 9162, 2.1): its roots and proofs, which `proofs` checks. A proof has at most 64 hashes.

Positions start at 0, and a tree of `size` leaves has the positions below `size`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from .proofs import EMPTY, node_hash


class Frontier:
    """A tree of `size` leaves that only grows, as the roots of its perfect subtrees, the largest first: at most one for
    each bit of `size`, else ValueError is raised.
    """

    def __init__(self, size: int = 0, hashes: Sequence[bytes] = ()) -> None:
        if len(hashes) != size.bit_count():
            raise ValueError(f"A tree of {size} leaves has {size.bit_count()} perfect subtrees, not {len(hashes)}.")
        self.size, self.hashes = size, [*hashes]

    def add(self, leaf: bytes) -> None:
        """Append a leaf, by its hash."""
        size, hashes = self.size, self.hashes
        while size & 1:
            leaf = node_hash(hashes.pop(), leaf)
            size >>= 1
        hashes.append(leaf)
        self.size += 1

    def extend(self, records: Iterable[bytes]) -> None:
        """Append records: `add` of each hash in one loop, because a process does it for each request."""
        size, hashes, sha256 = self.size, self.hashes, hashlib.sha256
        for record in records:
            leaf, at = sha256(b"\0" + record).digest(), size
            while at & 1:
                leaf = sha256(b"\1" + hashes.pop() + leaf).digest()
                at >>= 1
            hashes.append(leaf)
            size += 1
        self.size = size

    def root(self) -> bytes:
        if not self.hashes:
            return EMPTY
        *rest, root = self.hashes
        for left in reversed(rest):
            root = node_hash(left, root)
        return root


class Tree:
    """The hashes of a log's leaves from `start` on, the frontier of those before them, for roots and proofs."""

    def __init__(self, start: Frontier, leaves: Sequence[bytes]) -> None:
        self.start, self._leaves, self.size = start.size, leaves, start.size + len(leaves)
        self._known: dict[tuple[int, int], bytes] = {}
        left = 0
        for found in start.hashes:
            width = 1 << ((start.size - left).bit_length() - 1)
            self._known[left, left + width] = found
            left += width

    def root(self, size: int) -> bytes:
        """Return the root of the first `size` leaves. Raises ValueError for a size that is not known."""
        if not self.start <= size <= self.size:
            raise ValueError(f"The log can have the sizes {self.start} to {self.size}, but not the size {size}.")
        return self._hash(0, size) if size else EMPTY

    def inclusion(self, index: int, size: int) -> list[bytes]:
        """Return the proof that the leaf at `index` is one of the first `size`. Raises ValueError for deleted ones."""
        if not self.start <= index < size <= self.size:
            raise ValueError(f"The log has the positions {self.start} to {size - 1}, but not the position {index}.")
        return self._path(index, 0, size)

    def consistency(self, old: int, new: int) -> list[bytes]:
        """Return the proof that the first `old` leaves are the beginning of the first `new`. Raises ValueError."""
        if not (self.start <= old <= new <= self.size and old):
            raise ValueError(f"The log can have the sizes {self.start} to {self.size}, but not both {old} and {new}.")
        return self._subproof(old, 0, new, whole=True)

    def _hash(self, left: int, right: int) -> bytes:
        if (known := self._known.get((left, right))) is not None:
            return known
        if right - left == 1:
            return self._leaves[left - self.start]
        if left >= self.start:  # its leaves are all here: no need to recurse
            part = Frontier()
            for leaf in self._leaves[left - self.start : right - self.start]:
                part.add(leaf)
            return part.root()
        split = left + _split(right - left)
        return node_hash(self._hash(left, split), self._hash(split, right))

    def _path(self, index: int, left: int, right: int) -> list[bytes]:
        if right - left == 1:
            return []
        split = left + _split(right - left)
        if index < split:
            return [*self._path(index, left, split), self._hash(split, right)]
        return [*self._path(index, split, right), self._hash(left, split)]

    def _subproof(self, old: int, left: int, right: int, *, whole: bool) -> list[bytes]:
        if old == right:
            return [] if whole else [self._hash(left, right)]
        split = left + _split(right - left)
        if old <= split:
            return [*self._subproof(old, left, split, whole=whole), self._hash(split, right)]
        return [*self._subproof(old, split, right, whole=False), self._hash(left, split)]


def _split(width: int) -> int:
    """Return the largest power of two below `width`."""
    return 1 << ((width - 1).bit_length() - 1)
