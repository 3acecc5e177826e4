"""Embeddings: the mean of the last hidden states, scaled to length 1.

They have a context of their own, made when the first one is asked for.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from router.errors import EngineUnavailable

from .native import bindings
from .native.context import Context
from .native.weights import Weights
from .protocol import Emission
from .scheduling.sequence import Sequence

_CHUNK = 64  # tokens of a step: running answers wait for it


class Embedder:
    """One text at a time, one chunk per step of the engine."""

    def __init__(self, weights: Weights, cells: int, threads: int) -> None:
        self._weights = weights
        self._cells = cells
        self._threads = threads
        self._context: Context | None = None
        self.waiting: deque[Sequence] = deque()  # the first one is being read
        self._done = 0  # of its tokens
        self._sum: NDArray[np.float64] = np.zeros(weights.dimensions)

    def remove(self, sequence: Sequence) -> None:
        if self.waiting[0] is sequence:
            self._forget()
        self.waiting.remove(sequence)

    def step(self, out: list[Emission]) -> None:
        """Read one chunk of the first text."""
        sequence = self.waiting[0]
        try:
            finished = self._read_chunk(sequence)
        except EngineUnavailable as error:
            self.remove(sequence)
            out.append(sequence.fail(error.code, error.message))
            return
        if finished:
            mean = self._sum / len(sequence.prompt)
            self.remove(sequence)
            vector = mean / max(float(np.linalg.norm(mean)), 1e-12)
            tokens = len(sequence.prompt)
            out.append(
                Emission(sequence.id, finish_reason="stop", prompt_tokens=tokens, embedding=tuple(vector.tolist()))
            )

    def close(self) -> None:
        if self._context is not None:
            self._context.close()

    def _read_chunk(self, sequence: Sequence) -> bool:
        context = self._open()
        start = self._done
        count = min(_CHUNK, len(sequence.prompt) - start)
        context.token[:count] = sequence.prompt[start : start + count]
        context.position[:count] = range(start, start + count)
        context.wanted[:count] = 1
        if code := context.decode(count):
            raise EngineUnavailable(f"llama_decode failed with {code} while embedding; {bindings.complaint()}")
        self._sum += context.rows(count).sum(axis=0, dtype=np.float64)
        self._done += count
        return self._done == len(sequence.prompt)

    def _open(self) -> Context:
        if self._context is None:
            self._context = Context(
                self._weights,
                cells=self._cells,
                sequences=1,
                batch_tokens=_CHUNK,
                outputs=_CHUNK,
                threads=self._threads,
                embeddings=True,
            )
        return self._context

    def _forget(self) -> None:
        if self._context is not None:
            bindings.sequence_remove(self._context.memory, -1, -1, -1)
        self._done = 0
        self._sum[:] = 0
