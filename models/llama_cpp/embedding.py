"""Embeddings: the mean of the last hidden states, scaled to length 1.

Embeddings use a llama.cpp context of their own, created by the first request for one.
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

_CHUNK = 64  # tokens per step: running answers wait for it


class Embedder:
    """Embeds one text at a time, one chunk per step of the engine."""

    def __init__(self, weights: Weights, context_tokens: int, threads: int) -> None:
        self._weights = weights
        self._context_tokens = context_tokens
        self._threads = threads
        self._context: Context | None = None
        self.waiting: deque[Sequence] = deque()  # the first one is in progress
        self._decoded = 0  # tokens of the first one
        self._sum: NDArray[np.float64] = np.zeros(weights.embedding_dimensions)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, in progress or not."""
        if self.waiting[0] is sequence:
            self._reset()
        self.waiting.remove(sequence)

    def step(self, out: list[Emission]) -> None:
        """Decode one chunk of the first text; append its embedding to `out` when it is complete."""
        sequence = self.waiting[0]
        try:
            complete = self._decode_chunk(sequence)
        except EngineUnavailable as error:
            self.remove(sequence)
            out.append(sequence.fail(error.code, error.message))
            return
        if complete:
            tokens = len(sequence.prompt)
            mean = self._sum / tokens
            self.remove(sequence)
            vector = mean / max(float(np.linalg.norm(mean)), 1e-12)
            out.append(
                Emission(sequence.id, finish_reason="stop", prompt_tokens=tokens, embedding=tuple(vector.tolist()))
            )

    def close(self) -> None:
        if self._context is not None:
            self._context.close()

    def _decode_chunk(self, sequence: Sequence) -> bool:
        context = self._open_context()
        start = self._decoded
        count = min(_CHUNK, len(sequence.prompt) - start)
        context.use_adapter(sequence.adapter)
        context.token[:count] = sequence.prompt[start : start + count]
        context.position[:count] = range(start, start + count)
        context.needs_output[:count] = 1
        if code := context.decode(count):
            raise EngineUnavailable(f"llama_decode failed with {code} while embedding; {bindings.last_errors()}")
        self._sum += context.rows(count).sum(axis=0, dtype=np.float64)
        self._decoded += count
        return self._decoded == len(sequence.prompt)

    def _open_context(self) -> Context:
        if self._context is None:
            self._context = Context(
                self._weights,
                kv_tokens=self._context_tokens,
                sequences=1,
                batch_tokens=_CHUNK,
                outputs=_CHUNK,
                threads=self._threads,
                embeddings=True,
            )
        return self._context

    def _reset(self) -> None:
        if self._context is not None:
            bindings.sequence_remove(self._context.memory, -1, -1, -1)
        self._decoded = 0
        self._sum[:] = 0
