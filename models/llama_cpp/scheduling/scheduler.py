"""Selection of the next batch: jobs join between steps, and prompts are prefilled in chunks while others decode.

A sequence is *waiting* (no slot), *prefilling* (its prompt enters the KV cache chunk by chunk) or *decoding* (one
token per step). `Throughput` computes how many prompt tokens a step may prefill without delaying running answers
noticeably. Only the engine's thread uses this.

A batch holds sequences of one adapter, and adapters take turns: llama.cpp applies an adapter to a whole llama_decode.
After a change it builds its graph again (measured on a 0.5B: 5 ms beside steps of 35 ms), so a turn lasts for several
steps.
"""

from __future__ import annotations

from collections import deque

from ..native.context import Context
from ..native.weights import Adapter
from .kv_cache import BLOCK, KVCache
from .prompt_prefixes import PrefixSource, PromptPrefixes, slot_of
from .sequence import Sequence
from .speculation import Draft, DraftPlanner, forced_drafts

_PREFILL_S = 0.02  # prefill per step while sequences are decoding: a reader sees no gap
_PREFILL_ALONE_S = 0.1  # prefill per step otherwise: a cancel still takes effect soon
_MIN_PREFILL = 32  # tokens per step
_TILE = 64  # rows from which llama.cpp's flash attention works in tiles on a CPU (ggml-cpu/ops.cpp)
_DEEP = 512  # tokens of context from which a step of _TILE rows takes no longer than one of _MIN_PREFILL
_WEIGHT = 0.3  # of the newest measurement in the prefill rate
_WINDOW_S = 1.0
_TURN_S = 0.1  # a reader sees no gap, and a change of adapters costs a small share
_GROWTH = 16  # free cells for each running sequence before another one is admitted


def in_tiles(budget: int, left: int, room: int, decoding: int) -> int:
    """Return a step's number of prompt tokens, so that neither it nor the rest is smaller than a tile: with fewer rows
    attention takes several times as long for each, the more the longer the context.

    Args:
        budget, room: The wanted and the largest number.
        left: Tokens that are left of the prompts.
        decoding: Rows of sequences that are decoding.
    """
    budget = min(max(budget, _TILE - decoding), room)
    if left - budget >= _TILE or room < _TILE:
        return budget
    return left if left <= room else left - _TILE


class Throughput:
    """Rates over about the last second of work; idle time does not count."""

    def __init__(self, batch_tokens: int) -> None:
        self._batch_tokens = batch_tokens
        self._prefill_rate = _MIN_PREFILL / _PREFILL_S  # tokens/s; a guess that the first prompts correct
        self._tokens = self._steps = self._busy_s = 0.0

    def prefill_budget(self, decoding: int) -> int:
        """Return how many prompt tokens the next step may prefill beside `decoding` decoding sequences."""
        wanted = int(self._prefill_rate * (_PREFILL_S if decoding else _PREFILL_ALONE_S))
        return max(1, min(max(_MIN_PREFILL, wanted), self._batch_tokens - decoding))

    def record(self, step_s: float, sampled: int, decoding: int, prefilled: int, turns: int = 1) -> None:
        """Record a step.

        Args:
            sampled: Tokens sampled, by all sequences together.
            decoding: Sequences that were decoding.
            prefilled: Prompt tokens in the batch.
            turns: Number of adapter groups that take turns; each gets an equal share of the steps.
        """
        self._busy_s += step_s
        self._tokens += sampled
        self._steps += max(1.0, sampled / decoding) / turns if decoding else 0.0
        if prefilled:
            self._prefill_rate += _WEIGHT * ((prefilled + decoding) / max(step_s, 1e-6) - self._prefill_rate)
        if self._busy_s > _WINDOW_S:
            # Halving ages old measurements without a list of them.
            self._busy_s, self._tokens, self._steps = self._busy_s / 2, self._tokens / 2, self._steps / 2

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all sequences together."""
        return self._tokens / self._busy_s if self._busy_s else 0.0

    @property
    def stream_tokens_per_s(self) -> float:
        """Tokens per second of one running sequence, which gets one token from each decode step."""
        return self._steps / self._busy_s if self._busy_s else 0.0


class AdapterGroup:
    """The running sequences of one adapter, or with None those without one. `decoding` is in batch order."""

    __slots__ = ("adapter", "decoding", "last_tokens", "name", "prefilling")

    def __init__(self, name: str, adapter: Adapter | None) -> None:
        self.name = name
        self.adapter = adapter
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self.last_tokens: list[int] = []  # the token that each decoding sequence feeds next

    def __len__(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    @property
    def running(self) -> list[Sequence]:
        return [*self.decoding, *self.prefilling]


class AdapterTurns:
    """The adapter groups with running sequences, and `current`, whose turn it is."""

    def __init__(self) -> None:
        self.current = AdapterGroup("", None)
        self._groups = {"": self.current}  # by the adapter's name; after the current one, the longest waiting first
        self._end = 0.0

    def __len__(self) -> int:
        """Count the running sequences."""
        return sum(map(len, self._groups.values()))

    @property
    def groups(self) -> list[AdapterGroup]:
        return list(self._groups.values())

    def group_of(self, sequence: Sequence) -> AdapterGroup:
        """Return the sequence's group, which is created for its first sequence."""
        name = sequence.job.adapter
        if name not in self._groups:
            self._groups[name] = AdapterGroup(name, sequence.adapter)
        return self._groups[name]

    def is_over(self, now: float) -> bool:
        """Return whether the turn is over: its time has passed, or its group has no sequences left. `now`: seconds."""
        return len(self._groups) > 1 and not (self.current and now < self._end)

    def pass_on(self, now: float) -> bool:
        """Begin the next turn; return whether another group has it. `now`: seconds."""
        last = self.current
        order = [*(name for name in self._groups if self._groups[name] is not last), last.name]
        self._groups = {name: self._groups[name] for name in order if self._groups[name]}
        self.current = next(iter(self._groups.values()), last)
        self._end = now + _TURN_S
        return self.current is not last


class Scheduler:
    """Owns the queue of waiting sequences and the composition of the batch."""

    def __init__(
        self,
        context: Context,
        kv_cache: KVCache,
        prefixes: PromptPrefixes,
        throughput: Throughput,
        sequences: int,
        planner: DraftPlanner | None = None,
    ) -> None:
        """Schedule at most `sequences` sequences together. `planner`: None for no speculation."""
        self.waiting: deque[Sequence] = deque()
        self._turns = AdapterTurns()
        self.drafts: dict[int, Draft] = {}  # of this batch, by the index of their decoding sequence
        self.draft_rows = 0
        self.generated = 0  # tokens of the sequences that have ended
        self._planner = planner
        self._context = context
        self._kv_cache = kv_cache
        self._prefixes = prefixes
        self._throughput = throughput
        self._max_running = sequences
        self._batch_stale = True  # the rows of `decoding` are not in the context's batch
        self._unsynced_steps = 0  # steps since the lengths of the decoding slots were updated
        self._chunks: list[tuple[Sequence, int]] = []  # prompt tokens of each sequence in the batch, soft ones or text
        self.soft_whole = False  # the vectors of the batch see each other

    @property
    def running(self) -> int:
        return len(self._turns)

    @property
    def running_sequences(self) -> list[Sequence]:
        return [one for group in self._turns.groups for one in group.running]

    @property
    def current(self) -> AdapterGroup:
        """The running sequences of the adapter whose turn it is."""
        return self._turns.current

    @property
    def adapters(self) -> int:
        """Number of adapters with running sequences, which take turns; "no adapter" counts as one."""
        return max(1, sum(map(bool, self._turns.groups)))

    def take_turn(self, now: float) -> bool:
        """Choose the adapter of the next batch; return whether it has changed. `now`: seconds."""
        if not self._turns.is_over(now):
            return False
        self._sync_slots()
        if not self._turns.pass_on(now):
            return False
        self._context.use_adapter(self.current.adapter)
        self.discard_batch()
        return True

    def admit(self) -> None:
        """Admit waiting sequences, oldest first, while there are slots and cells."""
        deferred: list[Sequence] = []  # another sequence is prefilling the same prefix, which can be shared soon
        while self.waiting and self.running < self._max_running:
            sequence = self.waiting[0]
            group = self._turns.group_of(sequence)
            source = self._prefixes.find(sequence, group.running)
            if self._prefixes.in_prefill(sequence, group.prefilling) - source.tokens >= 2 * BLOCK:
                deferred.append(self.waiting.popleft())
            elif self._allocate(sequence, source):
                group.prefilling.append(self.waiting.popleft())
            else:
                break
        self.waiting.extendleft(reversed(deferred))

    def build_batch(self) -> tuple[int, list[tuple[Sequence, int]]]:
        """Write the next batch into the context; return its rows, and completed prompts' sequences and rows."""
        context, group = self._context, self.current
        running = len(group.decoding)
        if self._batch_stale:
            self._sync_slots()
            for row, sequence in enumerate(group.decoding):
                slot = slot_of(sequence)
                context.sequence[row], context.position[row] = slot.id, sequence.places.position(slot.length)
            context.needs_output[:running] = 1
            self._batch_stale = False
        context.token[:running] = group.last_tokens
        if group.prefilling:
            return self._add_prefill(running)
        return self._add_drafts(running), []

    def build_soft_batch(self) -> int:
        """Write the prompts' next soft tokens into the context's batch for soft tokens; return the number of rows.
        Vectors that attend to each other get a batch of their own.
        """
        self._chunks.clear()
        self.soft_whole = False
        room, row = self._throughput.prefill_budget(len(self.current.decoding)), 0
        for sequence in self.current.prefilling:
            slot = slot_of(sequence)
            count, whole = sequence.soft_run(slot.length)
            if whole and row:
                continue
            count = count if whole else min(count, room - row)
            if count:
                batch, start, end = self._context.soft_batch, slot.length, row + count
                batch.vector[row:end] = sequence.vectors_of(start, start + count)
                batch.place(slice(row, end), *sequence.places.offsets(start, start + count))
                batch.sequence[row:end] = slot.id
                self._chunks.append((sequence, count))
                row = end
            if whole:
                self.soft_whole = True
                break
        return row

    def commit_prefill(self) -> None:
        """Count the prompts' tokens of a decoded batch, soft tokens or text, as cached."""
        for sequence, tokens in self._chunks:
            self._kv_cache.grow(slot_of(sequence), tokens)
        self._chunks.clear()

    def commit_batch(self) -> None:
        """Count the tokens of a decoded batch as cached."""
        running = len(self.current.decoding)
        self._unsynced_steps += 1
        self._kv_cache.used += running
        self._context.position[:running] += 1
        if self._chunks:
            self.commit_prefill()

    def discard_batch(self) -> None:
        """Discard a batch that was not decoded; the next one is written from scratch."""
        self._batch_stale = True
        self._chunks.clear()
        self.clear_drafts()

    def settle_draft(self, draft: Draft, accepted: int) -> None:
        """Keep the cells of a draft's first `accepted` tokens, and free the others; the batch was committed."""
        sequence, context = self.current.decoding[draft.index], self._context
        slot = slot_of(sequence)
        self._kv_cache.grow(slot, accepted)
        context.position[draft.index] += accepted
        if accepted < len(draft.tokens):
            self._kv_cache.remove_from(slot, int(context.position[draft.index]))
        if self._planner is not None:
            self._planner.count(len(draft.tokens), accepted)

    def clear_drafts(self) -> None:
        """Discard the drafts of the last batch."""
        self.drafts.clear()
        self.draft_rows = 0

    def start_decoding(self, sequence: Sequence, token: int) -> None:
        """Move a sequence whose prompt is cached to `decoding`; `token` is its first one."""
        self._sync_slots()
        group = self.current
        group.prefilling.remove(sequence)
        group.decoding.append(sequence)
        group.last_tokens.append(token)
        self._batch_stale = True

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished sequence from any state; its cells are saved for prompts with the same prefix."""
        self._sync_slots()
        self.generated += sequence.completion_tokens
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self._leave_batch(sequence)
            self._prefixes.keep(sequence)
            self._kv_cache.release(slot_of(sequence))
            sequence.slot = None
        sequence.close()

    def preempt(self) -> bool:
        """Free the cells of the newest running sequence and requeue it first; False if no other runs."""
        if self.running < 2:
            return False
        self._sync_slots()
        newest = max(self.running_sequences, key=lambda sequence: sequence.id)
        self._leave_batch(newest)
        self._kv_cache.release(slot_of(newest))
        newest.restart()
        self.waiting.appendleft(newest)
        self.discard_batch()
        return True

    def _leave_batch(self, sequence: Sequence) -> None:
        group = self._turns.group_of(sequence)
        if sequence in group.prefilling:
            group.prefilling.remove(sequence)
            return
        index = group.decoding.index(sequence)
        del group.decoding[index], group.last_tokens[index]
        self._batch_stale = True

    def _sync_slots(self) -> None:
        """Update the lengths of the decoding slots. Updating them in every step would be slower."""
        if self._unsynced_steps:
            for sequence in self.current.decoding:
                slot_of(sequence).grow(self._unsynced_steps)
            self._unsynced_steps = 0

    def _add_drafts(self, row: int) -> int:
        """Write the drafts after the first `row` rows; return the number of rows."""
        context, decoding = self._context, self.current.decoding
        self.clear_drafts()
        room = min(self._kv_cache.free, context.capacity) - row
        drafts = forced_drafts(decoding, room)
        if not drafts and self._planner is not None:
            drafts = self._planner.plan(decoding, room)
        for draft in drafts:
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
        """Give prefilling sequences even shares of the budget; the oldest get what short prompts leave."""
        context, finishing = self._context, list[tuple[Sequence, int]]()
        self._chunks.clear()
        self.clear_drafts()
        room, budget = context.capacity - row, self._throughput.prefill_budget(row)
        pending = [(sequence, sequence.text_run(slot_of(sequence).length)) for sequence in self.current.prefilling]
        if not row or max(slot_of(sequence).length for sequence, _ in pending) >= _DEEP:
            budget = in_tiles(budget, sum(tokens for _, tokens in pending), room, row)
        budget = min(budget, room)
        share = max(1, budget // len(pending))
        spare = max(0, budget - sum(min(tokens, share) for _, tokens in pending))
        for sequence, tokens in pending:
            extra = min(spare, max(0, tokens - share))
            spare -= extra
            count = min(tokens, share + extra, context.capacity - row)
            if count <= 0:
                continue
            slot = slot_of(sequence)
            start, end = slot.length, row + count
            first = sequence.places.position(start)
            context.token[row:end] = sequence.pending_tokens[start : start + count]
            context.position[row:end] = range(first, first + count)
            context.sequence[row:end] = slot.id
            context.needs_output[row:end] = 0
            if start + count == len(sequence.pending_tokens):
                context.needs_output[end - 1] = 1
                finishing.append((sequence, end - 1))
            self._chunks.append((sequence, count))
            row = end
        return row, finishing

    def _allocate(self, sequence: Sequence, source: PrefixSource) -> bool:
        """Give a sequence a slot, if cells are free for its prompt and for the growth of the running sequences."""
        needed = len(sequence.pending_tokens) + 1 - (source.tokens if source.slot else 0)
        prefilling = (other for group in self._turns.groups for other in group.prefilling)
        reserved = sum(len(other.pending_tokens) - slot_of(other).length for other in prefilling)
        if self.running and self._kv_cache.free - reserved < needed + _GROWTH * (self.running + 1):
            return False
        position = sequence.places.position(source.tokens)
        sequence.slot = self._kv_cache.allocate(source.slot, source.tokens, position)
        cached = self._prefixes.restore(source, sequence.slot, position)
        if not sequence.generated:
            sequence.cached_tokens = cached
        return True
