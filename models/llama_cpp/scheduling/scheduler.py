"""Who runs in the next step: waiting jobs join between steps, prompts are taken in chunks beside running answers.

A sequence is *waiting* (no cells), *filling* (its prompt goes into the cache, chunk by chunk) or *decoding* (one token
a step). Only the engine's thread uses this.
"""

from __future__ import annotations

from collections import deque

import msgspec

from ..native.context import Context
from .kv_cache import KVCache, SequenceSlot
from .prefix_cache import BLOCK, PrefixCache, SavedPrefix, common_prefix
from .sequence import Sequence
from .throughput import Throughput

_GROWTH = 16  # free cells for each running answer before another one is let in


class PrefixSource(msgspec.Struct, frozen=True):
    """Where the first `tokens` of a prompt can be had without decoding: from a running line, or from a saved one."""

    tokens: int = 0
    line: SequenceSlot | None = None
    saved: SavedPrefix | None = None


class Scheduler:
    def __init__(
        self, context: Context, cells: KVCache, prefixes: PrefixCache | None, pace: Throughput, sequences: int
    ) -> None:
        """`sequences`: the most that run together. `prefixes` None: the model's cache cannot be shared."""
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []  # in batch order
        self.last: list[int] = []  # the token that each decoding sequence feeds next
        self._context = context
        self._cells = cells
        self._prefixes = prefixes
        self._pace = pace
        self._most = sequences
        self._moved = True  # decoding changed since the batch was laid out
        self._grown = 0  # steps since the decoding lines' lengths were brought up to date
        self._portions: list[tuple[Sequence, int]] = []  # of prompts, in the batch

    @property
    def running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    def admit(self) -> None:
        """Let waiting sequences in, oldest first, while there are places and cells."""
        held: list[Sequence] = []  # another one is just filling in their prompt's beginning: soon it can be shared
        while self.waiting and self.running < self._most:
            sequence = self.waiting[0]
            beginning = self._beginning(sequence)
            if self._soon(sequence) - beginning.tokens >= 2 * BLOCK:
                held.append(self.waiting.popleft())
            elif self._open(sequence, beginning):
                self.prefilling.append(self.waiting.popleft())
            else:
                break
        self.waiting.extendleft(reversed(held))

    def lay_out(self) -> tuple[int, list[tuple[Sequence, int]]]:
        """Write the next batch. Its rows; the sequences that will get their first token, with their batch place."""
        context, running = self._context, len(self.decoding)
        if self._moved:
            self._settle()
            for place, sequence in enumerate(self.decoding):
                line = _line(sequence)
                context.sequence[place], context.position[place] = line.id, line.length
            context.wanted[:running] = 1
            self._moved = False
        context.token[:running] = self.last
        return self._lay_prompts(running) if self.prefilling else (running, [])

    def advance(self) -> None:
        """The batch was decoded: what was laid out is in the cache now."""
        running = len(self.decoding)
        self._grown += 1
        self._cells.used += running
        self._context.position[:running] += 1
        if self._portions:
            for sequence, tokens in self._portions:
                self._cells.grow(_line(sequence), tokens)
            self._portions.clear()

    def relay(self) -> None:
        """The batch was not decoded: the next one is laid out anew."""
        self._moved = True
        self._portions.clear()

    def start_decoding(self, sequence: Sequence, token: int) -> None:
        """Its prompt is in the cache and its first token chosen."""
        self._settle()
        self.prefilling.remove(sequence)
        self.decoding.append(sequence)
        self.last.append(token)
        self._moved = True

    def remove(self, sequence: Sequence) -> None:
        """It ended, from whatever state; what its cells hold is kept for prompts that begin the same."""
        self._settle()
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self._stop(sequence)
            if self._prefixes is not None:
                self._prefixes.save(_line(sequence), sequence.cells())
            self._cells.close(_line(sequence))
            sequence.line = None
        sequence.close()

    def preempt(self) -> bool:
        """Take the cells of the newest running sequence, which starts over later; False when it is the only one."""
        if self.running < 2:
            return False
        self._settle()
        newest = max((*self.prefilling, *self.decoding), key=lambda sequence: sequence.id)
        self._stop(newest)
        self._cells.close(_line(newest))
        newest.restart()
        self.waiting.appendleft(newest)
        self.relay()
        return True

    def _stop(self, sequence: Sequence) -> None:
        if sequence in self.prefilling:
            self.prefilling.remove(sequence)
            return
        place = self.decoding.index(sequence)
        del self.decoding[place], self.last[place]
        self._moved = True

    def _settle(self) -> None:
        """Bring the decoding lines' lengths up to date; each step alone would cost more than it is worth."""
        if self._grown:
            for sequence in self.decoding:
                _line(sequence).grow(self._grown)
            self._grown = 0

    def _lay_prompts(self, row: int) -> tuple[int, list[tuple[Sequence, int]]]:
        """Every filling sequence gets an even share, what short ones leave goes to the oldest."""
        context, finishing = self._context, list[tuple[Sequence, int]]()
        self._portions.clear()
        left = min(self._pace.prompt_tokens(row), context.capacity - row)
        share = max(1, left // len(self.prefilling))
        wants = [(sequence, len(sequence.feed) - _line(sequence).length) for sequence in self.prefilling]
        spare = max(0, left - sum(min(want, share) for _, want in wants))
        for sequence, want in wants:
            extra = min(spare, max(0, want - share))
            spare -= extra
            count = min(want, share + extra, context.capacity - row)
            if count <= 0:
                break
            line = _line(sequence)
            start, end = line.length, row + count
            context.token[row:end] = sequence.feed[start : start + count]
            context.position[row:end] = range(start, start + count)
            context.sequence[row:end] = line.id
            context.wanted[row:end] = 0
            if start + count == len(sequence.feed):
                context.wanted[end - 1] = 1
                finishing.append((sequence, end - 1))
            self._portions.append((sequence, count))
            row = end
        return row, finishing

    def _beginning(self, sequence: Sequence) -> PrefixSource:
        """The longest known beginning of what it has to feed; the last token is always decoded, for its logits."""
        if self._prefixes is None:
            return PrefixSource()
        feed, most = sequence.feed, len(sequence.feed) - 1
        saved, tokens = self._prefixes.find(feed)
        best = PrefixSource(min(tokens, most), saved=saved)
        for other in (*self.decoding, *self.prefilling):
            line = _line(other)
            common = min(common_prefix(other.feed, feed), line.length, most)
            if common >= max(best.tokens, BLOCK):
                best = PrefixSource(common, line=line)
        return best

    def _soon(self, sequence: Sequence) -> int:
        """Tokens of its beginning that another one is filling in."""
        if self._prefixes is None:
            return 0
        soon = max((common_prefix(other.feed, sequence.feed) for other in self.prefilling), default=0)
        return min(soon, len(sequence.feed) - 1)

    def _open(self, sequence: Sequence, beginning: PrefixSource) -> bool:
        """Give it a line, if there are cells for its prompt and some for those that run already to grow."""
        needed = len(sequence.feed) + 1 - (beginning.tokens if beginning.line else 0)
        promised = sum(len(other.feed) - _line(other).length for other in self.prefilling)
        if self.running and self._cells.free - promised < needed + _GROWTH * (self.running + 1):
            return False
        cached = beginning.tokens
        sequence.line = self._cells.open(beginning.line, cached)
        if beginning.saved is not None and self._prefixes is not None:
            cached = self._prefixes.restore(beginning.saved, sequence.line, cached)
        if not sequence.tokens:
            sequence.cached = cached
        return True


def _line(sequence: Sequence) -> SequenceSlot:
    assert sequence.line is not None
    return sequence.line
