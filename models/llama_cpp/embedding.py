"""Embeddings: the mean of the last hidden states, scaled to length 1.

Embeddings have two llama.cpp contexts, each created for its first text: in one, many short texts share a batch; the
other has room for a text as long as the model's context, which is decoded in chunks. The caller whose texts took the
least time so far is next, and short texts never wait for a long one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, zip_longest
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from causeway_server.router.errors import EngineUnavailable

from .native import bindings
from .native.context import Context
from .native.weights import Weights
from .protocol import Emission
from .scheduling.scheduler import Throughput
from .scheduling.sequence import Sequence

_BATCH = 256  # tokens of a step at most
_SHORT_TOKENS = 512  # of a text that shares batches with others
_SHORT_CELLS = 4096
_SHORT_TEXTS = 64  # in progress together
_LONG_TEXTS = 8  # as far as the context has room for them together


class Flow(NamedTuple):
    """The texts of one caller, short or long, that share its engine time. `long`: decoded in chunks, one at a time."""

    caller: str
    long: bool


class EmbeddingQueue:
    """The texts that are not embedded yet, including those in progress."""

    def __init__(self, short_tokens: int) -> None:
        """Create an empty queue; a text of at most `short_tokens` tokens is short."""
        self._short_tokens = short_tokens
        self._texts: dict[Flow, deque[Sequence]] = {}
        self._used_s: dict[Flow, float] = {}  # time of the flow's texts, and what a new flow begins with

    def __len__(self) -> int:
        return sum(map(len, self._texts.values()))

    def __iter__(self) -> Iterator[Sequence]:
        return chain.from_iterable(self._texts.values())

    def append(self, text: Sequence) -> None:
        """Add a text behind those of its flow. A new flow starts with the time of the flow that has used the least."""
        flow = self._flow(text)
        if flow not in self._texts:
            self._texts[flow] = deque()
            self._used_s[flow] = min(self._used_s.values(), default=0.0)
        self._texts[flow].append(text)

    def remove(self, text: Sequence) -> None:
        """Remove a text in any state."""
        flow = self._flow(text)
        self._texts[flow].remove(text)
        if not self._texts[flow]:
            del self._texts[flow], self._used_s[flow]

    def charge(self, text: Sequence, seconds: float) -> None:
        """Count time against the flow of a text."""
        self._used_s[self._flow(text)] += seconds

    def turns(self) -> Iterator[tuple[bool, Iterator[Sequence]]]:
        """Yield flows by the time that they used, least first: whether the texts are long, and the texts for a batch.

        Of a long flow that is its first text alone; of a short flow also the short texts of the others, one of each in
        turn.
        """
        flows = sorted(self._texts, key=self._used_s.__getitem__)
        short = [self._texts[flow] for flow in flows if not flow.long]
        for flow in flows:
            if flow.long:
                yield True, iter([self._texts[flow][0]])
            elif short:
                rounds = zip_longest(*short)
                yield False, (text for texts in rounds for text in texts if text is not None)
                short = []

    def _flow(self, text: Sequence) -> Flow:
        return Flow(text.job.caller, len(text.prompt) > self._short_tokens)


class Embedder:
    """Embeds texts of many requests together. One step of the engine decodes one batch."""

    def __init__(self, weights: Weights, context_tokens: int, threads: int) -> None:
        """Embed texts of at most `context_tokens` tokens; a decode uses this number of `threads`."""
        short_tokens = min(_SHORT_TOKENS, context_tokens)
        self.waiting = EmbeddingQueue(short_tokens)
        self.steps = 0
        self._short = _TextBatch(weights, max(short_tokens, min(_SHORT_CELLS, context_tokens)), _SHORT_TEXTS, threads)
        self._long = _TextBatch(weights, context_tokens, _LONG_TEXTS, threads)

    def remove(self, text: Sequence) -> None:
        """Remove a text, in progress or not."""
        self._short.remove(text)
        self._long.remove(text)
        self.waiting.remove(text)

    def step(self, out: list[Emission], decoding: int) -> None:
        """Decode one batch; append completed embeddings to `out`. `decoding`: answers that wait for this step."""
        for long, texts in self.waiting.turns():
            batch = self._long if long else self._short
            if batch.fill(texts, decoding):
                self._decode(batch, out)
                return

    def close(self) -> None:
        self._short.close()
        self._long.close()

    def _decode(self, batch: _TextBatch, out: list[Emission]) -> None:
        started = time.perf_counter()
        try:
            complete = batch.decode()
        except EngineUnavailable as error:
            for text, _ in batch.shares:
                self.remove(text)
                out.append(text.fail(error.code, error.message))
            return
        finally:
            self.steps += 1
        step_s = time.perf_counter() - started
        batch.throughput.record(step_s, 0, 0, batch.rows)
        for text, rows in batch.shares:
            self.waiting.charge(text, step_s * rows / batch.rows)
        for text, total in complete:
            self.remove(text)
            mean = total / len(text.prompt)
            vector = tuple((mean / max(float(np.linalg.norm(mean)), 1e-12)).tolist())
            out.append(Emission(text.id, finish_reason="stop", prompt_tokens=len(text.prompt), embedding=vector))


class _Progress(msgspec.Struct, eq=False):
    """The progress of a text. `slot`: its sequence id; `total`: sum over tokens, float64 [dimensions]."""

    slot: int
    total: NDArray[np.float64]
    decoded: int = 0


class _TextBatch:
    """A llama.cpp context and its next batch, of one adapter: texts with their rows (`shares`), and `rows` of all."""

    def __init__(self, weights: Weights, cells: int, texts: int, threads: int) -> None:
        self.throughput = Throughput(_BATCH)
        self.shares: list[tuple[Sequence, int]] = []
        self.rows = 0
        self._weights = weights
        self._cells = self._free_cells = cells
        self._max_texts = texts
        self._slots = list(range(texts))
        self._threads = threads
        self._running: dict[Sequence, _Progress] = {}
        self._context: Context | None = None

    def fill(self, texts: Iterable[Sequence], decoding: int) -> int:
        """Write the next batch of these texts, in their order; return its rows. `decoding`: see `Embedder.step`."""
        self.shares, self.rows = [], 0
        context = self._open_context()
        budget = self.throughput.prefill_budget(decoding)
        for text in texts:
            if self.rows == budget:
                break
            if self.shares and text.adapter is not self.shares[0][0].adapter:
                continue
            if (progress := self._running.get(text) or self._admit(text)) is None:
                continue
            start, row = progress.decoded, self.rows
            count = min(budget - row, len(text.prompt) - start)
            end = row + count
            context.token[row:end] = text.prompt[start : start + count]
            context.position[row:end] = range(start, start + count)
            context.sequence[row:end] = progress.slot
            self.shares.append((text, count))
            self.rows = end
        return self.rows

    def decode(self) -> list[tuple[Sequence, NDArray[np.float64]]]:
        """Decode the batch; return the completed texts and their hidden states' sums. Raises EngineUnavailable."""
        context = self._open_context()
        context.needs_output[: self.rows] = 1
        context.use_adapter(self.shares[0][0].adapter)
        if code := context.decode(self.rows):
            raise EngineUnavailable(f"Embedding failed: llama_decode returned {code}: {bindings.last_errors()}")
        states = context.rows(self.rows)
        complete: list[tuple[Sequence, NDArray[np.float64]]] = []
        row = 0
        for text, count in self.shares:
            progress = self._running[text]
            progress.total += states[row : row + count].sum(axis=0, dtype=np.float64)
            progress.decoded += count
            row += count
            if progress.decoded == len(text.prompt):
                complete.append((text, progress.total))
        return complete

    def remove(self, text: Sequence) -> None:
        """Free a text's cells. No-op for a text that has none."""
        progress = self._running.pop(text, None)
        if progress is not None and self._context is not None:
            bindings.sequence_remove(self._context.memory, progress.slot, -1, -1)
            self._slots.append(progress.slot)
            self._free_cells += len(text.prompt)

    def close(self) -> None:
        if self._context is not None:
            self._context.close()

    def _admit(self, text: Sequence) -> _Progress | None:
        """Reserve cells for all tokens of a text; return None if too few are free."""
        if not self._slots or len(text.prompt) > self._free_cells:
            return None
        self._free_cells -= len(text.prompt)
        progress = self._running[text] = _Progress(self._slots.pop(), np.zeros(self._weights.embedding_dimensions))
        return progress

    def _open_context(self) -> Context:
        if self._context is None:
            self._context = Context(
                self._weights,
                kv_tokens=self._cells,
                sequences=self._max_texts,
                batch_tokens=_BATCH,
                outputs=_BATCH,
                threads=self._threads,
                embeddings=True,
            )
        return self._context
