"""Which sequences use which cells of the KV cache, and the prefixes that they share.

llama.cpp keeps one pool of cells; a cell holds one token's keys and values and may belong to several sequences. The
library does not report how many cells are in use, so they are counted here: a `SequenceSlot` (one sequence's cells) is
a chain of `KVSegment`s, each decoded by one sequence and used by others up to the point where their prompts differ.

Finished sequences leave the pool at once (see prefix_cache): attention passes over every cell up to the last one in
use, so idle cells would slow down every sequence.
"""

from __future__ import annotations

from ..native import bindings


class KVSegment:
    """Cells that one sequence decoded. `users`: sequence id -> how many of them, from the first, it uses."""

    __slots__ = ("users",)

    def __init__(self) -> None:
        self.users: dict[int, int] = {}

    @property
    def length(self) -> int:
        return max(self.users.values(), default=0)


class SequenceSlot:
    """One sequence's cells: shared segments, followed by its own. `length` tokens are in the cache."""

    __slots__ = ("_own", "_shared", "_shared_tokens", "id")

    def __init__(self, sequence: int, shared: list[tuple[KVSegment, int]]) -> None:
        """Begin with `shared`: segments, and how many cells of each."""
        self.id = sequence
        self._shared = [segment for segment, _ in shared]
        self._shared_tokens = sum(used for _, used in shared)
        for segment, used in shared:
            segment.users[sequence] = used
        self._own = KVSegment()
        self._own.users[sequence] = 0

    @property
    def length(self) -> int:
        return self._shared_tokens + self._own.users[self.id]

    def grow(self, tokens: int) -> None:
        self._own.users[self.id] += tokens

    def segments_of_first(self, tokens: int) -> list[tuple[KVSegment, int]]:
        """Return the segments that hold the first `tokens` tokens, with how many cells of each."""
        found: list[tuple[KVSegment, int]] = []
        for segment in (*self._shared, self._own):
            used = min(tokens, segment.users[self.id])
            if used:
                found.append((segment, used))
                tokens -= used
        return found

    def leave_segments(self) -> int:
        """Leave every segment; return how many cells have no user any more."""
        freed = 0
        for segment in (*self._shared, self._own):
            before = segment.length
            del segment.users[self.id]
            freed += before - segment.length
        return freed


class KVCache:
    """The pool: `total` cells of the native cache `memory`, for at most `sequences` slots."""

    def __init__(self, memory: bindings.Pointer, total: int, sequences: int) -> None:
        self._memory = memory
        self.total = total
        self.used = 0
        self._free_ids = list(range(sequences - 1, -1, -1))

    @property
    def free(self) -> int:
        return self.total - self.used

    def allocate(self, source: SequenceSlot | None = None, shared: int = 0, position: int = 0) -> SequenceSlot:
        """Open a slot that begins with the first `shared` tokens of `source`. The caller ensures that one is free.

        `position`: of the token behind them.
        """
        slot = SequenceSlot(self._free_ids.pop(), source.segments_of_first(shared) if source else [])
        if source is not None and shared:
            bindings.sequence_copy(self._memory, source.id, slot.id, 0, position)
        return slot

    def grow(self, slot: SequenceSlot, tokens: int) -> None:
        """Count `tokens` newly decoded tokens of `slot`."""
        slot.grow(tokens)
        self.used += tokens

    def remove_from(self, slot: SequenceSlot, position: int) -> None:
        """Free the cells from `position` on: decoded ones that were never counted, or of a slot that is released."""
        bindings.sequence_remove(self._memory, slot.id, position, -1)

    def release(self, slot: SequenceSlot) -> None:
        """Free the slot and the cells that no other sequence uses."""
        bindings.sequence_remove(self._memory, slot.id, -1, -1)
        self.used -= slot.leave_segments()
        self._free_ids.append(slot.id)
