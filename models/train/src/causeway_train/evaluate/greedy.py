"""Greedy answers to many prompts at once, for evaluation: llama.cpp's low-level calls, one sequence per slot.

The engine that serves requests is `models.llama_cpp`; this class is small and synchronous, and also returns raw logits.
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

from causeway_server.models.catalog.artifact import ArtifactError
from causeway_server.models.llama_cpp.native import bindings
from causeway_server.models.llama_cpp.native.vocabulary import Vocabulary
from causeway_server.models.llama_cpp.native.weights import Adapter
from causeway_server.models.llama_cpp.protocol import AdapterFile
from causeway_server.models.llama_cpp.sampler import ConfidenceMeter, GrammarCompiler, GrammarState
from causeway_server.router.types import Confidence

if TYPE_CHECKING:
    from typing import Self

_QUIET = llama_cpp.llama_log_callback(lambda level, text, data: None)
GGML_F32 = 0  # `enum ggml_type`
FLASH_ATTENTION_OFF = 0  # `enum llama_flash_attn_type`


class Answer(msgspec.Struct, frozen=True):
    """A greedy answer with its probabilities."""

    text: str
    tokens: tuple[int, ...]
    refuse: float  # probability of the refusal token at the first position; 0 where the model has none
    logprobs: tuple[float, ...]  # log-probabilities of the chosen tokens, before the grammar is applied
    confidences: tuple[Confidence, ...] = ()  # confidence after each of the first `confidence_tokens` tokens


class _ConfidenceRecorder:
    """Records the confidence after each of an answer's first tokens."""

    def __init__(self, meter: ConfidenceMeter) -> None:
        self.confidences: list[Confidence] = []
        self._meter = meter

    def observe(self, logits: NDArray[np.float32], token: int) -> None:
        if not self._meter.done:
            self.confidences.append(self._meter.observe(logits, token))


class GreedyModel:
    """A loaded GGUF. Not thread-safe; use as a context manager."""

    def __init__(
        self,
        path: Path,
        *,
        slots: int = 16,
        context: int = 8192,
        threads: int = 2,
        exact_cache: bool = False,
        adapter: AdapterFile | None = None,
    ) -> None:
        """Load a model.

        Args:
            slots: sequences decoded in parallel.
            context: KV cache cells, shared by all slots.
            adapter: LoRA adapter to answer with.
            exact_cache: keep keys and values at F32 instead of F16, to compare logits with other implementations.

        Raises:
            ArtifactError: llama.cpp cannot load the file or allocate the context.
        """
        llama_cpp.llama_backend_init()
        llama_cpp.llama_log_set(_QUIET, ctypes.c_void_p(0))
        self._slots = slots
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise ArtifactError(f"{path}: llama.cpp cannot load the file")
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
            raise ArtifactError(f"{path}: llama.cpp cannot allocate a context of {context} tokens")
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(2048, 0, 1)
        if adapter is not None and not self._use(adapter):
            self.close()
            raise ArtifactError(f"{adapter.path}: llama.cpp cannot load the file as an adapter of {path}")
        self.vocabulary = int(llama_cpp.llama_vocab_n_tokens(self._vocab))
        self._refuse = int(self.metadata("causeway.refuse_token_id") or -1)
        self._grammars = GrammarCompiler(Vocabulary(self._model))
        self.chat_template = (llama_cpp.llama_model_chat_template(self._model, None) or b"").decode()

    def _use(self, adapter: AdapterFile) -> bool:
        pointer = bindings.init_adapter(self._model, adapter.path.encode())
        used = Adapter(adapter.name, pointer, adapter.scale)
        return bool(pointer) and not bindings.set_adapters(self._context, used.pointers, 1, used.scales)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the memory; the model must not be used afterwards."""
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

    @property
    def end_token(self) -> int:
        """The token that ends an assistant's turn."""
        turn = int(llama_cpp.llama_vocab_eot(self._vocab))
        return turn if turn >= 0 else int(llama_cpp.llama_vocab_eos(self._vocab))

    def ends(self, token: int) -> bool:
        """Return whether `token` ends the answer."""
        return bool(llama_cpp.llama_vocab_is_eog(self._vocab, token))

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Return the next-token logits after every position: float32 [len(ids), vocabulary]."""
        llama_cpp.llama_memory_clear(self._memory, True)
        self._decode([(token, position, 0, True) for position, token in enumerate(ids)])
        return np.stack([self._row(index) for index in range(len(ids))])

    def answers(
        self,
        prompts: Sequence[Sequence[int]],
        limit: int = 128,
        grammars: Sequence[str] | None = None,
        *,
        confidence_tokens: int = 0,
    ) -> list[Answer]:
        """Return greedy answers in the order of the prompts.

        Args:
            limit: longest answer in tokens.
            grammars: one grammar of llguidance per prompt. As in the engine, a refusal token may precede the grammar.
            confidence_tokens: record the confidence that the engine would report after each of this many tokens.
        """
        done: list[Answer] = []
        for start in range(0, len(prompts), self._slots):
            group = slice(start, start + self._slots)
            rules = [None] * len(prompts[group]) if grammars is None else grammars[group]
            done += self._answer_group(prompts[group], limit, rules, confidence_tokens)
        return done

    def _answer_group(
        self, prompts: Sequence[Sequence[int]], limit: int, grammars: Sequence[str | None], confidence_tokens: int
    ) -> list[Answer]:
        llama_cpp.llama_memory_clear(self._memory, True)
        refuse = self._refuse
        refuse_token = refuse if refuse >= 0 else None
        recorders = [_ConfidenceRecorder(ConfidenceMeter(confidence_tokens, refuse_token)) for _ in prompts]
        states = [self._grammars.compile(grammar, keep=False) if grammar else None for grammar in grammars]
        tokens: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        refused = [0.0 for _ in prompts]
        # Prefill prompts one at a time (they differ in length), then decode all sequences in step.
        active: list[int] = []
        for slot, ids in enumerate(prompts):
            self._decode([(token, position, slot, position == len(ids) - 1) for position, token in enumerate(ids)])
            logits = self._row(len(ids) - 1)
            refused[slot] = float(np.exp(_log_softmax(logits)[refuse])) if refuse >= 0 else 0.0
            if self._accept(len(ids) - 1, states[slot], tokens[slot], logprobs[slot], recorders[slot]):
                active.append(slot)
        while active:
            self._decode([(tokens[s][-1], len(prompts[s]) + len(tokens[s]) - 1, s, True) for s in active])
            active = [
                s
                for index, s in enumerate(active)
                if self._accept(index, states[s], tokens[s], logprobs[s], recorders[s]) and len(tokens[s]) < limit
            ]
        return [
            Answer(
                text=b"".join(self.piece(token) for token in tokens[s]).decode(errors="replace"),
                tokens=tuple(tokens[s]),
                refuse=refused[s],
                logprobs=tuple(logprobs[s]),
                confidences=tuple(recorders[s].confidences),
            )
            for s in range(len(prompts))
        ]

    def _accept(
        self,
        index: int,
        grammar: GrammarState | None,
        tokens: list[int],
        logprobs: list[float],
        recorder: _ConfidenceRecorder,
    ) -> bool:
        """Sample and record the next token of a sequence; return False when it ends the answer."""
        logits = self._row(index)
        token = int(logits.argmax())
        if grammar is not None and not (not tokens and token == self._refuse):
            if not grammar.allows(token):
                allowed = grammar.allowed()
                token = int(allowed[logits[allowed].argmax()])
            grammar.accept(token)
        recorder.observe(logits, token)
        logprobs.append(float(_log_softmax(logits)[token]))
        if self.ends(token):
            return False
        tokens.append(token)
        return True

    def _decode(self, entries: Sequence[tuple[int, int, int, bool]]) -> None:
        """Decode a batch of (token, position, sequence, wants logits)."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for index, (token, position, sequence, wants_logits) in enumerate(entries):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = wants_logits
        code = llama_cpp.llama_decode(self._context, batch)
        if code:
            raise ArtifactError(f"llama_decode failed with code {code}")

    def _row(self, index: int) -> NDArray[np.float32]:
        pointer = llama_cpp.llama_get_logits_ith(self._context, index)
        return np.ctypeslib.as_array(pointer, shape=(self.vocabulary,)).copy()


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    shifted = logits - logits.max()
    result: NDArray[np.float32] = shifted - np.log(np.exp(shifted).sum())
    return result
