"""Which sequences are in the next batch: jobs join between steps, prompts are prefilled in chunks beside answers.

A sequence is *waiting* (no slot), *prefilling* (its prompt enters the KV cache chunk by chunk) or *decoding* (one
token per step). Only the engine's thread uses this.
"""

from __future__ import annotations

from collections import deque

import msgspec

from ..native.context import Context
from ..native.vocabulary import Tokens
from .kv_cache import KVCache, SequenceSlot
from .prefix_cache import BLOCK, PrefixCache, SavedPrefix, common_prefix, copy_state
from .prompt_store import PromptStore
from .sequence import Sequence
from .speculation import Draft, DraftPlanner
from .throughput import Throughput

_GROWTH = 16  # free cells for each running sequence before another one is admitted


class PrefixSource(msgspec.Struct, frozen=True):
    """Where the first `tokens` of a prompt are available without decoding: in a running slot, or saved."""

    tokens: int = 0
    slot: SequenceSlot | None = None
    saved: SavedPrefix | None = None


class Scheduler:
    """Owns the queue of waiting sequences and the composition of the batch."""

    def __init__(
        self,
        context: Context,
        kv_cache: KVCache,
        prefix_cache: PrefixCache | None,
        throughput: Throughput,
        sequences: int,
        planner: DraftPlanner | None = None,
        prompt_store: PromptStore | None = None,
    ) -> None:
        """Schedule sequences.

        Args:
            context, kv_cache, throughput: of the engine.
            prefix_cache: None: this model cannot share prefixes.
            sequences: the maximal number of sequences together.
            planner: None: no speculation.
            prompt_store: system prompts as files; None: none.
        """
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []  # in batch order
        self.last_tokens: list[int] = []  # the token that each decoding sequence feeds next
        self.drafts: dict[int, Draft] = {}  # of this batch, by the index of their decoding sequence
        self.draft_rows = 0
        self._planner = planner
        self._prompt_store = prompt_store
        self._context = context
        self._kv_cache = kv_cache
        self._prefix_cache = prefix_cache
        self._throughput = throughput
        self._max_running = sequences
        self._batch_stale = True  # `decoding` changed since its rows were written
        self._unsynced_steps = 0  # steps since the lengths of the decoding slots were updated
        self._prefill_chunks: list[tuple[Sequence, int]] = []  # prompt tokens of each sequence in the batch

    @property
    def running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    def admit(self) -> None:
        """Admit waiting sequences, oldest first, while there are slots and cells."""
        deferred: list[Sequence] = []  # another sequence is prefilling the same prefix, which can be shared soon
        while self.waiting and self.running < self._max_running:
            sequence = self.waiting[0]
            source = self._find_prefix(sequence)
            if self._prefix_in_prefill(sequence) - source.tokens >= 2 * BLOCK:
                deferred.append(self.waiting.popleft())
            elif self._allocate(sequence, source):
                self.prefilling.append(self.waiting.popleft())
            else:
                break
        self.waiting.extendleft(reversed(deferred))

    def build_batch(self) -> tuple[int, list[tuple[Sequence, int]]]:
        """Write the next batch into the context.

        Returns:
            The number of rows, and the sequences whose prompt this batch completes, with the row of their logits.
        """
        context, running = self._context, len(self.decoding)
        if self._batch_stale:
            self._sync_slots()
            for row, sequence in enumerate(self.decoding):
                slot = _slot(sequence)
                context.sequence[row], context.position[row] = slot.id, slot.length
            context.needs_output[:running] = 1
            self._batch_stale = False
        context.token[:running] = self.last_tokens
        if self.prefilling:
            return self._add_prefill(running)
        return (self._add_drafts(running, self._planner) if self._planner is not None else running), []

    def commit_batch(self) -> None:
        """The batch was decoded: count its tokens as cached."""
        running = len(self.decoding)
        self._unsynced_steps += 1
        self._kv_cache.used += running
        self._context.position[:running] += 1
        if self._prefill_chunks:
            for sequence, tokens in self._prefill_chunks:
                self._kv_cache.grow(_slot(sequence), tokens)
            self._prefill_chunks.clear()

    def discard_batch(self) -> None:
        """The batch was not decoded: write the next one from scratch."""
        self._batch_stale = True
        self._prefill_chunks.clear()
        self.clear_drafts()

    def settle_draft(self, draft: Draft, accepted: int) -> None:
        """Keep the cells of a draft's first `accepted` tokens, and free the others; the batch was committed."""
        sequence, context = self.decoding[draft.index], self._context
        slot = _slot(sequence)
        self._kv_cache.grow(slot, accepted)
        context.position[draft.index] += accepted
        if accepted < len(draft.tokens):
            self._kv_cache.remove_from(slot, int(context.position[draft.index]))
        if self._planner is not None:
            self._planner.count(len(draft.tokens), accepted)

    def clear_drafts(self) -> None:
        """Forget the drafts of the last batch."""
        self.drafts.clear()
        self.draft_rows = 0

    def start_decoding(self, sequence: Sequence, token: int) -> None:
        """Move a sequence whose prompt is cached to `decoding`; `token` is its first one."""
        self._sync_slots()
        self.prefilling.remove(sequence)
        self.decoding.append(sequence)
        self.last_tokens.append(token)
        self._batch_stale = True

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished sequence in any state; its cells are saved for prompts with the same prefix."""
        self._sync_slots()
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self._leave_batch(sequence)
            if self._prefix_cache is not None:
                self._prefix_cache.save(_slot(sequence), sequence.tokens_in_slot())
            if self._prompt_store is not None:
                self._store_prompt(sequence, self._prompt_store)
            self._kv_cache.release(_slot(sequence))
            sequence.slot = None
        sequence.close()

    def _store_prompt(self, sequence: Sequence, store: PromptStore) -> None:
        """Store the system prompt of a sequence that leaves: its slot's other cells are of no more use."""
        slot, tokens = _slot(sequence), sequence.prompt[: sequence.system_tokens]
        if slot.length < len(tokens) or not store.wants(tokens):
            return
        self._kv_cache.remove_from(slot, len(tokens))
        if (state := copy_state(self._context.pointer, slot)) is not None:
            store.save(tokens, state)

    def preempt(self) -> bool:
        """Free the cells of the newest running sequence and requeue it first; False when it is the only one."""
        if self.running < 2:
            return False
        self._sync_slots()
        newest = max((*self.prefilling, *self.decoding), key=lambda sequence: sequence.id)
        self._leave_batch(newest)
        self._kv_cache.release(_slot(newest))
        newest.restart()
        self.waiting.appendleft(newest)
        self.discard_batch()
        return True

    def _leave_batch(self, sequence: Sequence) -> None:
        if sequence in self.prefilling:
            self.prefilling.remove(sequence)
            return
        index = self.decoding.index(sequence)
        del self.decoding[index], self.last_tokens[index]
        self._batch_stale = True

    def _sync_slots(self) -> None:
        """Update the lengths of the decoding slots; doing so in every step would cost more."""
        if self._unsynced_steps:
            for sequence in self.decoding:
                _slot(sequence).grow(self._unsynced_steps)
            self._unsynced_steps = 0

    def _add_drafts(self, row: int, planner: DraftPlanner) -> int:
        """Write the drafts behind the first `row` rows; return the number of rows."""
        context = self._context
        self.clear_drafts()
        room = min(self._kv_cache.free, context.capacity) - row
        for draft in planner.plan(self.decoding, room):
            end = row + len(draft.tokens)
            first = int(context.position[draft.index]) + 1
            context.token[row:end] = draft.tokens
            context.position[row:end] = range(first, first + len(draft.tokens))
            context.sequence[row:end] = context.sequence[draft.index]
            context.needs_output[row:end] = 1
            draft.row, row = row, end
            self.drafts[draft.index] = draft
            self.draft_rows += len(draft.tokens)
        return row

    def _add_prefill(self, row: int) -> tuple[int, list[tuple[Sequence, int]]]:
        """Give every prefilling sequence an even share of the budget; the oldest get what short prompts leave."""
        context, finishing = self._context, list[tuple[Sequence, int]]()
        self._prefill_chunks.clear()
        self.clear_drafts()
        budget = min(self._throughput.prefill_budget(row), context.capacity - row)
        share = max(1, budget // len(self.prefilling))
        pending = [(sequence, len(sequence.pending_tokens) - _slot(sequence).length) for sequence in self.prefilling]
        spare = max(0, budget - sum(min(tokens, share) for _, tokens in pending))
        for sequence, tokens in pending:
            extra = min(spare, max(0, tokens - share))
            spare -= extra
            count = min(tokens, share + extra, context.capacity - row)
            if count <= 0:
                break
            slot = _slot(sequence)
            start, end = slot.length, row + count
            context.token[row:end] = sequence.pending_tokens[start : start + count]
            context.position[row:end] = range(start, start + count)
            context.sequence[row:end] = slot.id
            context.needs_output[row:end] = 0
            if start + count == len(sequence.pending_tokens):
                context.needs_output[end - 1] = 1
                finishing.append((sequence, end - 1))
            self._prefill_chunks.append((sequence, count))
            row = end
        return row, finishing

    def _find_prefix(self, sequence: Sequence) -> PrefixSource:
        """Find the longest available prefix of a sequence; its last token is always decoded, for its logits."""
        if self._prefix_cache is None:
            return PrefixSource()
        tokens, limit = sequence.pending_tokens, len(sequence.pending_tokens) - 1
        saved, saved_tokens = self._prefix_cache.find(tokens)
        if self._prompt_store is not None and saved_tokens < sequence.system_tokens:
            self._load_prompt(tokens, saved_tokens, self._prompt_store, self._prefix_cache)
            saved, saved_tokens = self._prefix_cache.find(tokens)
        best = PrefixSource(min(saved_tokens, limit), saved=saved)
        for other in (*self.decoding, *self.prefilling):
            slot = _slot(other)
            common = min(common_prefix(other.pending_tokens, tokens), slot.length, limit)
            if common >= max(best.tokens, BLOCK):
                best = PrefixSource(common, slot=slot)
        return best

    def _load_prompt(self, tokens: Tokens, better_than: int, store: PromptStore, cache: PrefixCache) -> None:
        """Put the stored beginning of a prompt into the prefix cache, if it is longer than what is there."""
        stored = store.find(tokens)
        if stored is None or len(stored.tokens) <= better_than:
            return
        state = store.load(stored)
        if state is not None and not cache.insert(stored.tokens, state):
            store.forget(stored)

    def _prefix_in_prefill(self, sequence: Sequence) -> int:
        """Return how many of its first tokens another sequence is prefilling."""
        if self._prefix_cache is None:
            return 0
        common = (common_prefix(other.pending_tokens, sequence.pending_tokens) for other in self.prefilling)
        return min(max(common, default=0), len(sequence.pending_tokens) - 1)

    def _allocate(self, sequence: Sequence, source: PrefixSource) -> bool:
        """Give it a slot, if there are cells for its prompt and some for the running sequences to grow."""
        needed = len(sequence.pending_tokens) + 1 - (source.tokens if source.slot else 0)
        reserved = sum(len(other.pending_tokens) - _slot(other).length for other in self.prefilling)
        if self.running and self._kv_cache.free - reserved < needed + _GROWTH * (self.running + 1):
            return False
        cached = source.tokens
        sequence.slot = self._kv_cache.allocate(source.slot, cached)
        if source.saved is not None and self._prefix_cache is not None:
            cached = self._prefix_cache.restore(source.saved, sequence.slot, cached)
        if not sequence.generated:
            sequence.cached_tokens = cached
        return True


def _slot(sequence: Sequence) -> SequenceSlot:
    assert sequence.slot is not None
    return sequence.slot
