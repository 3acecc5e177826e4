"""Who uses which cells of the KV cache: running sequences, and the prefixes that they share.

llama.cpp keeps one pool of cells; a cell holds one token's keys and values and may belong to several sequences. It does
not say how many are in use, so that is counted here: a `Line` (one sequence's cells) is a chain of `Span`s, each made
by the sequence that decoded it, and used by others up to where their prompts part.

Ended sequences leave the pool at once (see prefixes): attention passes over every cell up to the last one in use, so
what lies idle there would slow down everybody.
"""

from __future__ import annotations

from ..native import bindings


class KVSegment:
    """Cells that one sequence made. `users`: sequence id → how many of them, from the beginning, it uses."""

    __slots__ = ("users",)

    def __init__(self) -> None:
        self.users: dict[int, int] = {}

    @property
    def length(self) -> int:
        return max(self.users.values(), default=0)


class SequenceSlot:
    """One sequence's cells: shared spans and then its own. `length` tokens are in the cache."""

    __slots__ = ("_own", "_shared", "_spans", "id")

    def __init__(self, sequence: int, spans: list[tuple[KVSegment, int]]) -> None:
        self.id = sequence
        self._spans = [span for span, _ in spans]
        self._shared = sum(used for _, used in spans)
        for span, used in spans:
            span.users[sequence] = used
        self._own = KVSegment()
        self._own.users[sequence] = 0

    @property
    def length(self) -> int:
        return self._shared + self._own.users[self.id]

    def grow(self, tokens: int) -> None:
        self._own.users[self.id] += tokens

    def first(self, tokens: int) -> list[tuple[KVSegment, int]]:
        """The spans that hold the first `tokens`, with how much of each."""
        taken: list[tuple[KVSegment, int]] = []
        for span in (*self._spans, self._own):
            used = min(tokens, span.users[self.id])
            if used:
                taken.append((span, used))
                tokens -= used
        return taken

    def release(self) -> int:
        """Leave every span; how many cells nobody uses any more."""
        freed = 0
        for span in (*self._spans, self._own):
            before = span.length
            del span.users[self.id]
            freed += before - span.length
        return freed


class KVCache:
    """The pool. `memory` is the native cache, with `total` cells for `sequences` lines."""

    def __init__(self, memory: bindings.Pointer, total: int, sequences: int) -> None:
        self._memory = memory
        self.total = total
        self.used = 0
        self._free_ids = list(range(sequences - 1, -1, -1))

    @property
    def free(self) -> int:
        return self.total - self.used

    def open(self, source: SequenceSlot | None = None, shared: int = 0) -> SequenceSlot:
        """A new line, which begins with the first `shared` tokens of `source`. There are as many ids as can run."""
        line = SequenceSlot(self._free_ids.pop(), source.first(shared) if source else [])
        if source is not None and shared:
            bindings.sequence_copy(self._memory, source.id, line.id, 0, shared)
        return line

    def grow(self, line: SequenceSlot, tokens: int) -> None:
        line.grow(tokens)
        self.used += tokens

    def close(self, line: SequenceSlot) -> None:
        """Give a line's cells back."""
        bindings.sequence_remove(self._memory, line.id, -1, -1)
        self.used -= line.release()
        self._free_ids.append(line.id)
