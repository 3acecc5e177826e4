"""Greedy answers to many prompts at once, for evaluation: llama.cpp's low-level calls, one sequence per slot.

The engine that serves users is `models.llama_cpp`; this one is small, synchronous, and also hands out raw logits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import llama_cpp
import msgspec
import numpy as np
from numpy.typing import NDArray

from router.types import Confidence

from ..catalog.artifact import ArtifactError
from ..llama_cpp.sampling.confidence import ConfidenceMeter

if TYPE_CHECKING:
    from typing import Self

_QUIET = llama_cpp.llama_log_callback(lambda level, text, data: None)
GGML_F32 = 0  # `enum ggml_type`
FLASH_ATTENTION_OFF = 0  # `enum llama_flash_attn_type`


class Answer(msgspec.Struct, frozen=True):
    """A greedy answer, and how sure the model was of it."""

    text: str
    tokens: tuple[int, ...]
    refuse: float  # probability of the refusal token at the first position; 0 where the model has none
    logprobs: tuple[float, ...]  # of the chosen tokens, before any grammar
    confidences: tuple[Confidence, ...] = ()  # after each of the first tokens, as many as were asked for


class _Watched:
    """The confidences of one answer so far."""

    def __init__(self, surety: ConfidenceMeter) -> None:
        self.seen: list[Confidence] = []
        self._surety = surety

    def observe(self, logits: NDArray[np.float32], token: int) -> None:
        if not self._surety.done:
            self.seen.append(self._surety.observe(logits, token))


class GreedyModel:
    """A GGUF held open. Not thread safe; use as a context manager."""

    def __init__(
        self, path: Path, *, slots: int = 16, context: int = 8192, threads: int = 2, exact_cache: bool = False
    ) -> None:
        """`exact_cache` keeps keys and values at F32 instead of F16, to compare logits with other implementations."""
        llama_cpp.llama_backend_init()
        llama_cpp.llama_log_set(_QUIET, ctypes.c_void_p(0))
        self._slots = slots
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise ArtifactError(f"{path}: llama.cpp cannot load it")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = context, 2048, 512
        params.n_seq_max, params.kv_unified = slots, True
        if exact_cache:
            params.type_k = params.type_v = GGML_F32
            params.flash_attn_type = FLASH_ATTENTION_OFF
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            llama_cpp.llama_model_free(self._model)
            raise ArtifactError(f"{path}: llama.cpp cannot make a context of {context} tokens")
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(2048, 0, 1)
        self.vocabulary = int(llama_cpp.llama_vocab_n_tokens(self._vocab))
        self._refuse = int(self.metadata("causeway.refuse_token_id") or -1)
        self.chat_template = (llama_cpp.llama_model_chat_template(self._model, None) or b"").decode()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Give the memory back; the model is not used after that."""
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)

    def metadata(self, key: str) -> str | None:
        buffer = ctypes.create_string_buffer(4096)
        length = llama_cpp.llama_model_meta_val_str(self._model, key.encode(), buffer, len(buffer))
        return buffer.value.decode() if length >= 0 else None

    def tokenize(self, text: str, special: bool = True) -> list[int]:
        raw = text.encode()
        ids = (llama_cpp.llama_token * (len(raw) + 8))()
        count = llama_cpp.llama_tokenize(self._vocab, raw, len(raw), ids, len(ids), False, special)
        return list(ids[:count])

    def piece(self, token: int, special: bool = False) -> bytes:
        buffer = ctypes.create_string_buffer(256)
        length = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, special)
        return buffer.raw[: max(0, length)]

    def ends(self, token: int) -> bool:
        return bool(llama_cpp.llama_vocab_is_eog(self._vocab, token))

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """float32 [len(ids), vocabulary]: next-token logits after every position."""
        llama_cpp.llama_memory_clear(self._memory, True)
        self._fill([(token, place, 0, True) for place, token in enumerate(ids)])
        return np.stack([self._row(index) for index in range(len(ids))])

    def answers(
        self,
        prompts: Sequence[Sequence[int]],
        limit: int = 128,
        grammars: Sequence[str] | None = None,
        *,
        watch: int = 0,
    ) -> list[Answer]:
        """Greedy answers of at most `limit` tokens, in the order of the prompts, with the confidence that the engine
        would report after each of the first `watch` tokens.

        `grammars`: one for each prompt. As in the engine, a refusal may come before what they ask for.
        """
        done: list[Answer] = []
        for start in range(0, len(prompts), self._slots):
            group = slice(start, start + self._slots)
            rules = [None] * len(prompts[group]) if grammars is None else grammars[group]
            done += self._answer_group(prompts[group], limit, rules, watch)
        return done

    def _answer_group(
        self, prompts: Sequence[Sequence[int]], limit: int, grammars: Sequence[str | None], watch: int
    ) -> list[Answer]:
        llama_cpp.llama_memory_clear(self._memory, True)
        refuse = self._refuse
        watched = [_Watched(ConfidenceMeter(watch, refuse if refuse >= 0 else None)) for _ in prompts]
        samplers = [self._sampler(grammar) for grammar in grammars]
        tokens: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        refused = [0.0 for _ in prompts]
        # Prompts one at a time (they differ in length), then all sequences in step.
        waiting: list[int] = []
        for slot, ids in enumerate(prompts):
            self._fill([(token, place, slot, place == len(ids) - 1) for place, token in enumerate(ids)])
            logits = self._row(len(ids) - 1)
            refused[slot] = float(np.exp(_log_softmax(logits)[refuse])) if refuse >= 0 else 0.0
            if self._take(slot, len(ids) - 1, samplers[slot], tokens[slot], logprobs[slot], watched[slot]):
                waiting.append(slot)
        while waiting:
            step = [(tokens[s][-1], len(prompts[s]) + len(tokens[s]) - 1, s, True) for s in waiting]
            self._fill(step)
            waiting = [
                s
                for index, s in enumerate(waiting)
                if self._take(s, index, samplers[s], tokens[s], logprobs[s], watched[s]) and len(tokens[s]) < limit
            ]
        for sampler in samplers:
            llama_cpp.llama_sampler_free(sampler)
        return [
            Answer(
                text=b"".join(self.piece(token) for token in tokens[s]).decode(errors="replace"),
                tokens=tuple(tokens[s]),
                refuse=refused[s],
                logprobs=tuple(logprobs[s]),
                confidences=tuple(watched[s].seen),
            )
            for s in range(len(prompts))
        ]

    def _take(
        self,
        slot: int,
        index: int,
        sampler: object,
        tokens: list[int],
        logprobs: list[float],
        watched: _Watched,
    ) -> bool:
        """Choose the next token of a sequence; False when it ends the answer."""
        logits = self._row(index)
        if not tokens and int(logits.argmax()) == self._refuse:
            token = self._refuse
        else:
            token = int(llama_cpp.llama_sampler_sample(sampler, self._context, index))
        watched.observe(logits, token)
        logprobs.append(float(_log_softmax(logits)[token]))
        if self.ends(token):
            return False
        tokens.append(token)
        return True

    def _sampler(self, grammar: str | None) -> object:
        chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        if grammar:
            rules = llama_cpp.llama_sampler_init_grammar(self._vocab, grammar.encode(), b"root")
            if not rules:
                raise ArtifactError("llama.cpp refused the grammar")
            llama_cpp.llama_sampler_chain_add(chain, rules)
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_greedy())
        return chain

    def _fill(self, entries: Sequence[tuple[int, int, int, bool]]) -> None:
        """Decode (token, position, sequence, wants logits) entries in one batch."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for index, (token, position, sequence, wanted) in enumerate(entries):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = wanted
        code = llama_cpp.llama_decode(self._context, batch)
        if code:
            raise ArtifactError(f"llama_decode answered {code}")

    def _row(self, index: int) -> NDArray[np.float32]:
        pointer = llama_cpp.llama_get_logits_ith(self._context, index)
        return np.ctypeslib.as_array(pointer, shape=(self.vocabulary,)).copy()


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    shifted = logits - logits.max()
    result: NDArray[np.float32] = shifted - np.log(np.exp(shifted).sum())
    return result
