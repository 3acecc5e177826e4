"""One step: lay out a batch, decode it, choose each sequence's next token, tell what there is to tell."""

from __future__ import annotations

import time

from router.errors import EngineUnavailable

from .loading import EngineParts
from .native import bindings
from .protocol import Emission
from .sampling.confidence import LogitsRow
from .sampling.sampler import NO_TOKEN
from .scheduling.sequence import Sequence


class StepRunner:
    """Only the engine's thread uses this. `steps`: llama_decode calls so far."""

    def __init__(self, loaded: EngineParts) -> None:
        self.steps = 0
        self._context = loaded.context
        self._cells = loaded.cells
        self._schedule = loaded.schedule
        self._pace = loaded.pace
        self._texts = loaded.vocabulary.texts

    def step(self, out: list[Emission]) -> None:
        """Every running sequence gets on by a token or a piece of its prompt. Raises EngineUnavailable when broken."""
        started = time.perf_counter()
        schedule = self._schedule
        rows, finishing = schedule.lay_out()
        if not self._make_room(rows, out):
            return
        code = self._context.decode(rows)
        self.steps += 1
        if code:
            self._not_decoded(code, rows, out)
            return
        decoding = len(schedule.decoding)
        schedule.advance()
        made = self._choose_all(finishing, out)
        self._pace.note(time.perf_counter() - started, made, decoding, rows - decoding)

    def _choose_all(self, finishing: list[tuple[Sequence, int]], out: list[Emission]) -> int:
        """The next token of every sequence that has logits now. Tokens made."""
        schedule, texts = self._schedule, self._texts
        decoding = schedule.decoding
        logits = self._context.rows(len(decoding) + len(finishing))
        if not len(logits):
            return 0
        best: list[int] = logits.argmax(axis=1).tolist()
        schedule.last = best[: len(decoding)]
        ended: list[Sequence] = []
        for place, sequence in enumerate(decoding):
            token = best[place]
            if sequence.chooser is None and sequence.quick:
                text = texts[token]
                if text is not None and sequence.made + 1 < sequence.limit:
                    out.append(sequence.quick_take(token, text))
                    continue
            schedule.last[place] = self._choose(sequence, token, logits[place], place, out)
            if sequence.ended:
                ended.append(sequence)
        for row, (sequence, place) in enumerate(finishing, len(decoding)):
            if sequence.made == 0 and (first := sequence.begin()) is not None:
                out.append(first)
            token = self._choose(sequence, best[row], logits[row], place, out)
            if sequence.ended:
                ended.append(sequence)
            else:
                schedule.start_decoding(sequence, token)
        for sequence in ended:
            schedule.remove(sequence)
        return len(best)

    def _choose(self, sequence: Sequence, best: int, row: LogitsRow, place: int, out: list[Emission]) -> int:
        """One sequence's token at batch place `place`."""
        token, chooser = best, sequence.chooser
        if chooser is not None:
            seen = row.copy() if sequence.watched and chooser.adjusts else row
            token = chooser.choose(row, self._context.pointer, place)
            row = seen
            if token != NO_TOKEN:
                chooser.accept(token)
                text = self._texts[token] if sequence.quick else None
                if text is not None and sequence.made + 1 < sequence.limit:
                    out.append(sequence.quick_take(token, text))
                    return token
        if (emission := sequence.take(token, row)) is not None:
            out.append(emission)
        return token

    def _make_room(self, rows: int, out: list[Emission]) -> bool:
        """Cells for the batch, if need be those of the newest sequence; False when the batch changed."""
        if self._cells.free >= rows:
            return True
        if not self._schedule.preempt():
            self._give_up(out)
        return False

    def _not_decoded(self, code: int, rows: int, out: list[Emission]) -> None:
        """llama_decode said no: 1 means that it found too few cells, anything else that it is broken."""
        self._schedule.relay()
        # It knows better how many there are; else the sequence that makes room now would come back at once.
        self._cells.total = min(self._cells.total, self._cells.used + rows - 1)
        if code != 1:
            raise EngineUnavailable(f"llama_decode failed with {code}; {bindings.complaint()}")
        if not self._schedule.preempt():
            self._give_up(out)

    def _give_up(self, out: list[Emission]) -> None:
        """The only sequence that runs does not fit."""
        detail = f"no free cell among {self._cells.total}"
        for sequence in [*self._schedule.decoding, *self._schedule.prefilling]:
            self._schedule.remove(sequence)
            out.append(sequence.fail("engine_out_of_memory", detail))
