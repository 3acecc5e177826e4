"""The loop that feeds `llama_decode` and does nothing else: no sampling, no text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from causeway_server.models.llama_cpp.native import bindings
from causeway_server.models.llama_cpp.native.context import Context
from causeway_server.models.llama_cpp.native.vocabulary import Vocabulary
from causeway_server.models.llama_cpp.native.weights import Weights


class Raw:
    """A loaded model for up to `sequences` sequences of at most `tokens` each, prompts and answers together."""

    def __init__(self, path: Path, threads: int, sequences: int, tokens: int, gpu_layers: int = 0) -> None:
        self._weights = Weights(path, gpu_layers)
        self._vocabulary = Vocabulary(self._weights.pointer)
        self._context = Context(
            self._weights,
            kv_tokens=sequences * tokens * 2,
            sequences=sequences,
            batch_tokens=512,
            outputs=sequences,
            threads=threads,
        )

    def tokens(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a prompt."""
        return tuple(self._vocabulary.encode(text, special=False).tolist())

    def run(self, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        """Tokens/s of answers of `tokens` tokens to all prompts together; a prompt's last token gives the first."""
        context, batch, end = self._context, len(prompts), 0
        bindings.sequence_remove(context.memory, -1, -1, -1)
        started = time.perf_counter()
        for number, prompt in enumerate(prompts):
            place = slice(end, end := end + len(prompt))
            context.token[place] = prompt
            context.position[place] = range(len(prompt))
            context.sequence[place] = number
            context.needs_output[place] = 0
            context.needs_output[end - 1] = 1
        self._decode(end)
        context.position[:batch] = [len(prompt) for prompt in prompts]
        context.sequence[:batch] = range(batch)
        context.needs_output[:batch] = 1
        for _ in range(tokens - 1):
            self._decode(batch)
            context.position[:batch] += 1
        return batch * tokens / (time.perf_counter() - started)

    def close(self) -> None:
        self._context.close()
        self._weights.close()

    def _decode(self, rows: int) -> None:
        if code := self._context.decode(rows):
            raise RuntimeError(f"llama_decode returned {code}")


def prompt_of(number: int, tokens: int) -> tuple[int, ...]:
    """Return a prompt that shares nothing with another one, so that no cache helps."""
    return tuple(300 + (7 * number + 3 * place) % 200 for place in range(tokens))
