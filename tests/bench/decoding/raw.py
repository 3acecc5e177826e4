"""The loop that feeds `llama_decode` and does nothing else: no sampling, no text."""

from __future__ import annotations

import time
from pathlib import Path

from models.llama_cpp.native import bindings
from models.llama_cpp.native.context import Context
from models.llama_cpp.native.weights import Weights


class Raw:
    """A loaded model for up to `sequences` sequences of a prompt and an answer each."""

    def __init__(self, path: Path, threads: int, sequences: int, prompt_tokens: int, answer_tokens: int) -> None:
        self._weights = Weights(path)
        self._prompt, self._answer = prompt_tokens, answer_tokens
        self._context = Context(
            self._weights,
            kv_tokens=sequences * (prompt_tokens + answer_tokens) * 2,
            sequences=sequences,
            batch_tokens=512,
            outputs=sequences,
            threads=threads,
        )

    def run(self, batch: int) -> float:
        """Tokens/s of `batch` sequences together; each prompt's last token gives the first of its answer."""
        context, prompt = self._context, self._prompt
        bindings.sequence_remove(context.memory, -1, -1, -1)
        started = time.perf_counter()
        for number in range(batch):
            place = slice(number * prompt, (number + 1) * prompt)
            context.token[place] = prompt_of(number, prompt)
            context.position[place] = range(prompt)
            context.sequence[place] = number
            context.needs_output[place] = 0
            context.needs_output[place.stop - 1] = 1
        self._decode(batch * prompt)
        context.position[:batch] = prompt
        context.sequence[:batch] = range(batch)
        context.needs_output[:batch] = 1
        for _ in range(self._answer - 1):
            self._decode(batch)
            context.position[:batch] += 1
        return batch * self._answer / (time.perf_counter() - started)

    def close(self) -> None:
        self._context.close()
        self._weights.close()

    def _decode(self, rows: int) -> None:
        if code := self._context.decode(rows):
            raise RuntimeError(f"llama_decode returned {code}")


def prompt_of(number: int, tokens: int) -> tuple[int, ...]:
    """Return a prompt that shares nothing with another one, so that no cache helps."""
    return tuple(300 + (7 * number + 3 * place) % 200 for place in range(tokens))
