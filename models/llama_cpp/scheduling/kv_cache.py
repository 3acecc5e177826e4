"""Accounting of KV cache cells: cells of sequences, prefixes that sequences share, and prefixes kept for later prompts.

llama.cpp keeps one pool of cells; a cell holds one token's keys and values and may belong to several sequences. The
library does not report how many cells are in use, so they are counted here: a `SequenceSlot` (one sequence's cells) is
a chain of `KVSegment`s, each decoded by one sequence and used by others up to the point where their prompts differ.

Finished sequences leave the pool at once, for the `PrefixCache`: attention passes over every cell up to the last one
in use, so idle cells would slow down every sequence. Measured with one thread, beside other load: restoring 4 tokens
takes 21 µs and decoding them 0.8 ms for the model that ships, 23 µs and 69 ms for one of 0.5 billion parameters; 500
tokens take 0.2 and 69 ms, and 0.6 ms and 4 s.

Each saved state has memory pages of its own, which are returned to the system when it is evicted. On the heap, states
of many sizes left holes: 14 MB after 4,000 prompts, and growing.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Iterator
from itertools import takewhile

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..native import bindings
from ..native.vocabulary import Tokens

BLOCK = 4  # tokens: a shorter common prefix is decoded again
KVSegment = dict[int, int]
"""Cells that one sequence decoded: for each sequence id that uses them, the number of cells from the first."""


class SequenceSlot:
    """The cells of a sequence: shared segments, followed by its own. `length` tokens are in the cache."""

    __slots__ = ("_own", "_shared", "_shared_tokens", "id")

    def __init__(self, sequence: int, shared: list[tuple[KVSegment, int]]) -> None:
        """Begin with `shared`: segments, and the number of cells of each."""
        self.id = sequence
        self._shared = [segment for segment, _ in shared]
        self._shared_tokens = sum(used for _, used in shared)
        for segment, used in shared:
            segment[sequence] = used
        self._own: KVSegment = {sequence: 0}

    @property
    def length(self) -> int:
        return self._shared_tokens + self._own[self.id]

    def grow(self, tokens: int) -> None:
        self._own[self.id] += tokens

    def segments_of_first(self, tokens: int) -> list[tuple[KVSegment, int]]:
        """Return the segments that hold the first `tokens` tokens, with the number of cells of each."""
        found: list[tuple[KVSegment, int]] = []
        for segment in (*self._shared, self._own):
            used = min(tokens, segment[self.id])
            if used:
                found.append((segment, used))
                tokens -= used
        return found

    def leave_segments(self) -> int:
        """Leave every segment; return the number of cells that no sequence uses any more."""
        freed = 0
        for segment in (*self._shared, self._own):
            before = max(segment.values())
            del segment[self.id]
            freed += before - max(segment.values(), default=0)
        return freed


class KVCache:
    """The pool of cells: `total` cells of the native cache `memory`, for at most `sequences` slots."""

    def __init__(self, memory: bindings.Pointer, total: int, sequences: int) -> None:
        self._memory = memory
        self.total = total
        self.used = 0
        self._free_ids = list(range(sequences - 1, -1, -1))

    @property
    def free(self) -> int:
        return self.total - self.used

    def allocate(self, source: SequenceSlot | None = None, shared: int = 0, position: int = 0) -> SequenceSlot:
        """Open a slot with the first `shared` tokens of `source`, up to `position`. The caller ensures a free one."""
        slot = SequenceSlot(self._free_ids.pop(), source.segments_of_first(shared) if source else [])
        if source is not None and shared:
            bindings.sequence_copy(self._memory, source.id, slot.id, 0, position)
        return slot

    def grow(self, slot: SequenceSlot, tokens: int) -> None:
        """Count `tokens` newly decoded tokens of `slot`."""
        slot.grow(tokens)
        self.used += tokens

    def remove_from(self, slot: SequenceSlot, position: int) -> None:
        """Free the cells from `position` on (-1: all): uncounted ones, or those of a released slot."""
        bindings.sequence_remove(self._memory, slot.id, position, -1)

    def release(self, slot: SequenceSlot) -> None:
        """Free the slot and the cells that no other sequence uses."""
        self.remove_from(slot, -1)
        self.used -= slot.leave_segments()
        self._free_ids.append(slot.id)


class SavedPrefix(msgspec.Struct, frozen=True, eq=False):
    """A sequence's saved cells: `tokens`, and llama.cpp's copy of their state, which depends on the adapter too."""

    adapter: str
    tokens: Tokens
    state: NDArray[np.uint8]
    keys: tuple[int, ...]  # hash keys of its prefixes, each a block longer than the one before


class PrefixCache:
    """At most `limit_bytes` of saved prefixes, evicted least recently used first.

    They are found by a chain of hashes over blocks of tokens, which begins with the adapter. In layers with a sliding
    window, a saved state holds only what the token after it attends to: a prefix longer than the window can only be
    used whole.
    """

    def __init__(self, context: bindings.Pointer, kv_cache: KVCache, limit_bytes: int, window: int = 0) -> None:
        """Create an empty cache. `window`: number of tokens that a layer attends to; 0: all."""
        self._window = window
        self._context = context
        self._kv_cache = kv_cache
        self._limit = limit_bytes
        self.bytes = 0
        self._saved: OrderedDict[int, SavedPrefix] = OrderedDict()  # by the key of all its blocks
        self._by_key: dict[int, list[SavedPrefix]] = {}

    def __len__(self) -> int:
        return len(self._saved)

    def find(self, prompt: Tokens, adapter: str) -> tuple[SavedPrefix | None, int]:
        """Return the saved prefix of this adapter that shares most with `prompt`, and how many tokens."""
        keys = list(takewhile(self._by_key.__contains__, _block_keys(prompt, adapter)))
        longest_first = (one for key in reversed(keys) for one in reversed(self._by_key[key]))
        best = next((one for one in longest_first if self._is_usable(one, prompt)), None)
        if best is None or best.adapter != adapter:
            return None, 0
        common = common_prefix(best.tokens, prompt)
        return (best, common) if common >= BLOCK else (None, 0)

    def _is_usable(self, saved: SavedPrefix, prompt: Tokens) -> bool:
        """Return whether the saved cells suffice in layers with a sliding window. The last token is always decoded."""
        if not self._window or len(saved.tokens) <= self._window:
            return True
        return min(common_prefix(saved.tokens, prompt), len(prompt) - 1) >= len(saved.tokens) - 1

    def restore(self, saved: SavedPrefix, slot: SequenceSlot, tokens: int, position: int) -> int:
        """Restore `tokens` tokens before `position` into an empty slot; return their number, 0 without room."""
        self._saved.move_to_end(saved.keys[-1])
        state = saved.state
        restored = self._kv_cache.free >= len(saved.tokens) and bindings.state_set(
            self._context, state.ctypes.data, len(state), slot.id
        )
        if not restored:
            self._kv_cache.remove_from(slot, -1)
            return 0
        self._kv_cache.remove_from(slot, position)
        self._kv_cache.grow(slot, tokens)
        return tokens

    def save(self, slot: SequenceSlot, tokens: Tokens, adapter: str) -> None:
        """Save the slot's cells, which hold `tokens`, unless they are saved already or shorter than a block."""
        keys = tuple(_block_keys(tokens, adapter))
        if not keys:
            return
        if keys[-1] in (self._saved if self._window else self._by_key):
            self._saved.move_to_end(self._by_key[keys[-1]][-1].keys[-1])
            return
        size = bindings.state_size(self._context, slot.id)
        if not 0 < size <= self._limit:
            return
        if (state := copy_state(self._context, slot)) is not None:
            self._add(SavedPrefix(adapter, tokens, state, keys))

    def insert(self, tokens: Tokens, state: NDArray[np.uint8]) -> bool:
        """Add a state from elsewhere, for the model without an adapter; False if it exceeds the cache."""
        fits = len(state) <= self._limit
        if fits:
            self._add(SavedPrefix("", tokens, state, tuple(_block_keys(tokens, ""))))
        return fits

    def _add(self, saved: SavedPrefix) -> None:
        keys = saved.keys
        # A saved prefix of this one is of no more use, unless this one is only of use whole.
        for key in keys[-1:] if self._window else keys:
            if (shorter := self._saved.get(key)) is not None:
                self._evict(shorter)
        self._saved[keys[-1]] = saved
        for key in keys:
            self._by_key.setdefault(key, []).append(saved)
        self.bytes += len(saved.state)
        while self.bytes > self._limit:
            self._evict(next(iter(self._saved.values())))

    def _evict(self, saved: SavedPrefix) -> None:
        del self._saved[saved.keys[-1]]
        self.bytes -= len(saved.state)
        for key in saved.keys:
            self._by_key[key].remove(saved)
            if not self._by_key[key]:
                del self._by_key[key]


def copy_state(context: bindings.Pointer, slot: SequenceSlot) -> NDArray[np.uint8] | None:
    """Return llama.cpp's copy of a slot's cells; None if there is no memory for it."""
    size = bindings.state_size(context, slot.id)
    state = allocate_pages(size)
    if state is None or bindings.state_get(context, state.ctypes.data, size, slot.id) != size:
        return None
    return state


def allocate_pages(size: int) -> NDArray[np.uint8] | None:
    """Map `size` bytes of anonymous memory; None when the system has no more."""
    try:
        return np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    except OSError:
        return None


def common_prefix(one: Tokens, other: Tokens) -> int:
    """Return the number of first tokens that are equal in both."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length


def _block_keys(tokens: Tokens, adapter: str) -> Iterator[int]:
    """Hash each prefix of whole blocks. A collision costs a comparison, never a wrong prefix."""
    raw, key = tokens.tobytes(), hash(adapter)
    width = BLOCK * tokens.itemsize
    for end in range(width, len(raw) + 1, width):
        key = hash((key, raw[end - width : end]))
        yield key
