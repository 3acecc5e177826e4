"""A GGUF that is compared: its logits for given tokens by chunks, and its greedy answers, unconstrained."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import psutil
from numpy.typing import NDArray

from causeway_server.router.types import Message

from ..catalog.artifact import ArtifactError
from ..llama_cpp.native import bindings
from ..llama_cpp.native.context import Context
from ..llama_cpp.native.resources import choose_threads
from ..llama_cpp.native.vocabulary import Tokens, Vocabulary
from ..llama_cpp.native.weights import Weights
from ..llama_cpp.prompts import PromptEncoder, SoftTokenIds
from ..llama_cpp.protocol import KVType, Prompt
from .prompts import EvaluationPrompt

_LOGITS_BYTES = 32 * 2**20  # of one chunk
_CHUNK_TOKENS = 256
_ALTERNATIVES = 20


class GreedyAnswer(msgspec.Struct, frozen=True):
    """An answer. `alternatives`: texts of the likeliest first tokens, the likeliest first."""

    text: str
    tokens: tuple[int, ...]
    alternatives: tuple[str, ...]


class ComparedModel:
    """A loaded model. One thread at a time.

    `memory_bytes`: resident, after a first chunk; `read`, `written`: tokens of prompts and answers, with seconds.
    """

    def __init__(self, path: Path, *, context: int, threads: int, kv_type: KVType = "f16") -> None:
        """Load a model. `context`: tokens of a prompt with its answer. Raises EngineUnavailable."""
        before = psutil.Process().memory_info().rss
        self._weights = weights = Weights(path)
        weights.kv_bytes_per_token(kv_type)
        self.vocabulary = Vocabulary(weights.pointer, weights.refuse_token)
        self._chunk = max(1, min(_CHUNK_TOKENS, context, _LOGITS_BYTES // (4 * self.vocabulary.size)))
        self._context = Context(
            weights,
            kv_tokens=context,
            sequences=1,
            batch_tokens=self._chunk,
            outputs=self._chunk,
            threads=choose_threads(threads),
            kv_type=kv_type,
        )
        self._room = context
        parts = weights.positions_have_parts
        soft = SoftTokenIds(weights.input_dimensions, self._chunk, positions_have_parts=parts)
        self._encoder = PromptEncoder(self.vocabulary, weights.chat_template, context, soft)
        self.read, self.written = [0.0, 0.0], [0.0, 0.0]
        self._decode(np.zeros(self._chunk, np.int32), 0)
        self.memory_bytes = psutil.Process().memory_info().rss - before

    def encode(self, prompt: EvaluationPrompt) -> Tokens:
        """Return the prompt as a chat's tokens, int32 [tokens]. Raises ArtifactError if the context has no room."""
        tokens = self._encoder.tokens(Prompt(messages=(Message("user", prompt.question),)))
        if len(tokens) + prompt.answer_tokens > self._room:
            raise ArtifactError(
                f"A prompt of {len(tokens)} tokens with an answer of {prompt.answer_tokens} exceeds the context of "
                f"{self._room} tokens: raise --context. The prompt begins with {prompt.prompt[:60]!r}."
            )
        return tokens

    def logits(self, tokens: Tokens) -> Iterator[NDArray[np.float32]]:
        """Decode tokens by chunks. Each chunk's logits, float32 [tokens, vocabulary], are valid until the next one."""
        bindings.sequence_remove(self._context.memory, 0, -1, -1)
        for start in range(0, len(tokens), self._chunk):
            yield self._decode(tokens[start : start + self._chunk], start)

    def answer(self, prompt: Tokens, limit: int) -> GreedyAnswer:
        """Return the greedy answer of at most `limit` tokens."""
        started = time.perf_counter()
        last: NDArray[np.float32] = np.zeros(self.vocabulary.size, np.float32)
        for rows in self.logits(prompt):
            last = rows[-1]
        read = time.perf_counter()
        likeliest = np.argsort(last)[: -_ALTERNATIVES - 1 : -1]
        chosen: list[int] = []
        while len(chosen) < limit and (token := int(last.argmax())) not in self.vocabulary.end_tokens:
            chosen.append(token)
            last = self._decode(np.array([token], np.int32), len(prompt) + len(chosen) - 1)[0]
        self.read = [self.read[0] + len(prompt), self.read[1] + read - started]
        self.written = [self.written[0] + len(chosen), self.written[1] + time.perf_counter() - read]
        texts = tuple(self.vocabulary.decode([token]) for token in likeliest.tolist())
        return GreedyAnswer(self.vocabulary.decode(chosen).strip(), tuple(chosen), texts)

    def close(self) -> None:
        self._context.close()
        self._weights.close()

    def _decode(self, tokens: Tokens, start: int) -> NDArray[np.float32]:
        context, count = self._context, len(tokens)
        context.token[:count], context.sequence[:count], context.needs_output[:count] = tokens, 0, 1
        context.position[:count] = range(start, start + count)
        if code := context.decode(count):
            raise ArtifactError(f"{self._weights.path}: llama_decode failed with code {code}")
        return context.rows(count)
