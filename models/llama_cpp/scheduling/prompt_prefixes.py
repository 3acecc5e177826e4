"""Where the first tokens of a prompt are available without decoding: in a running slot, saved in memory, or in a file.

Whatever the source, it is of the same adapter: keys and values depend on it.
"""

from __future__ import annotations

import msgspec

from ..native import bindings
from ..native.vocabulary import Tokens
from .adapter_turns import AdapterGroup
from .kv_cache import BLOCK, KVCache, PrefixCache, SavedPrefix, SequenceSlot, common_prefix, copy_state
from .prompt_store import PromptStore
from .sequence import Sequence


class PrefixSource(msgspec.Struct, frozen=True):
    """Where the first `tokens` of a prompt are available: in a running slot, or saved."""

    tokens: int = 0
    slot: SequenceSlot | None = None
    saved: SavedPrefix | None = None


class PromptPrefixes:
    """Finds prefixes for sequences that begin, and keeps those of sequences that leave.

    Args:
        context: of the engine.
        kv_cache: of the engine.
        cache: None: this model cannot share prefixes.
        store: system prompts as files; None: none.
    """

    def __init__(
        self, context: bindings.Pointer, kv_cache: KVCache, cache: PrefixCache | None, store: PromptStore | None
    ) -> None:
        self._context = context
        self._kv_cache = kv_cache
        self._cache = cache
        self._store = store

    def find(self, sequence: Sequence, group: AdapterGroup) -> PrefixSource:
        """Find the longest prefix of a sequence that is available in its group, in memory or in a file.

        Its last token is always decoded, for its logits.
        """
        if self._cache is None:
            return PrefixSource()
        tokens, limit = sequence.pending_tokens, len(sequence.pending_tokens) - 1
        saved, saved_tokens = self._cache.find(tokens, group.name)
        if self._store is not None and saved_tokens < sequence.system_tokens:
            self._load(tokens, saved_tokens, self._store, self._cache)
            saved, saved_tokens = self._cache.find(tokens, group.name)
        best = PrefixSource(sequence.cut(min(saved_tokens, limit)), saved=saved)
        for other in (*group.decoding, *group.prefilling):
            slot = slot_of(other)
            common = sequence.cut(min(common_prefix(other.pending_tokens, tokens), slot.length, limit))
            if common >= max(best.tokens, BLOCK):
                best = PrefixSource(common, slot=slot)
        return best

    def in_prefill(self, sequence: Sequence, group: AdapterGroup) -> int:
        """Return how many of its first tokens another sequence of its group is prefilling."""
        if self._cache is None:
            return 0
        common = (common_prefix(other.pending_tokens, sequence.pending_tokens) for other in group.prefilling)
        return min(max(common, default=0), len(sequence.pending_tokens) - 1)

    def restore(self, source: PrefixSource, slot: SequenceSlot, position: int) -> int:
        """Restore a saved prefix into a new slot. Returns the tokens in it; those of a running slot are there.

        `position`: of the token behind the prefix.
        """
        if source.saved is None or self._cache is None:
            return source.tokens
        return self._cache.restore(source.saved, slot, source.tokens, position)

    def keep(self, sequence: Sequence) -> None:
        """Keep what the slot of a sequence that leaves holds: in memory, and its system prompt as a file."""
        slot = slot_of(sequence)
        if self._cache is not None:
            self._cache.save(slot, sequence.tokens_in_slot(), sequence.job.adapter)
        prompt = sequence.prompt[: sequence.system_tokens]
        if self._store is None or slot.length < len(prompt) or not self._store.wants(prompt):
            return
        self._kv_cache.remove_from(slot, len(prompt))  # its other cells are of no more use
        if (state := copy_state(self._context, slot)) is not None:
            self._store.save(prompt, state)

    def _load(self, tokens: Tokens, better_than: int, store: PromptStore, cache: PrefixCache) -> None:
        """Put the stored beginning of a prompt into the cache, if it is longer than what is there."""
        stored = store.find(tokens)
        if stored is None or len(stored.tokens) <= better_than:
            return
        state = store.load(stored)
        if state is not None and not cache.insert(stored.tokens, state):
            store.forget(stored)


def slot_of(sequence: Sequence) -> SequenceSlot:
    """Return the slot of a running sequence."""
    assert sequence.slot is not None
    return sequence.slot
