"""The llama.cpp context; its batch and logits are numpy views, so a step copies and allocates nothing."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor

import llama_cpp.llama_cpp as native
import numpy as np
from numpy.typing import NDArray

from causeway_server.router.errors import EngineUnavailable

from ..protocol import KVType
from . import bindings
from .weights import Adapter, Weights

_INT32 = ctypes.POINTER(ctypes.c_int32)
_PARTS = 4  # of a position: llama.h has time, row, column and one that stays 0
_FLASH_AUTO = native.LLAMA_FLASH_ATTN_TYPE_AUTO
_KV_TYPES: dict[KVType, int] = {"f16": native.GGML_TYPE_F16, "q8_0": native.GGML_TYPE_Q8_0}


class Batch:
    """Rows of tokens or of vectors; llama.cpp never takes both in one batch.

    `position`, `sequence` (int32) and `needs_output` (int8) are [rows] each. A row belongs to one sequence. `token`:
    int32 [rows]; `vector`: float32 [rows, dimensions]; `parts`: of the vectors' positions, int32 [4, rows], where they
    have parts.
    """

    def __init__(self, rows: int, dimensions: int = 0, *, positions_have_parts: bool = False) -> None:
        """Allocate the arrays. `dimensions`: of the vectors; 0 for a batch of tokens."""
        self.token = np.zeros(rows, np.int32)
        self.vector = np.zeros((rows, dimensions), np.float32)
        self.position = np.zeros(rows * (_PARTS if positions_have_parts else 1), np.int32)
        self.parts = np.zeros((_PARTS, rows), np.int32) if positions_have_parts else None
        self.sequence = np.zeros(rows, np.int32)
        self.needs_output = np.zeros(rows, np.int8)
        self._ones = np.ones(rows, np.int32)
        self._pointers = (self.sequence.ctypes.data + 4 * np.arange(rows)).astype(np.uint64)
        self.native = native.llama_batch(
            n_tokens=0,
            token=None if dimensions else ctypes.cast(self.token.ctypes.data, _INT32),
            embd=ctypes.cast(self.vector.ctypes.data, ctypes.POINTER(ctypes.c_float)) if dimensions else None,
            pos=ctypes.cast(self.position.ctypes.data, _INT32),
            n_seq_id=ctypes.cast(self._ones.ctypes.data, _INT32),
            seq_id=ctypes.cast(self._pointers.ctypes.data, ctypes.POINTER(_INT32)),
            logits=ctypes.cast(self.needs_output.ctypes.data, ctypes.POINTER(ctypes.c_int8)),
        )

    def place(self, rows: slice, first: int, offsets: NDArray[np.int32] | None = None) -> None:
        """Write the positions of vectors from `first` on. `offsets`: from it, int32 [3, rows]; None: consecutive."""
        count = rows.stop - rows.start
        if self.parts is None:
            self.position[rows] = range(first, first + count)
        else:
            self.parts[:3, rows] = first + (np.arange(count, dtype=np.int32) if offsets is None else offsets)

    def finish(self, rows: int) -> None:
        """Set the batch to `rows` rows. llama.cpp wants the first parts of all positions, then all second parts."""
        self.native.n_tokens = rows
        if self.parts is not None:
            self.position[: _PARTS * rows] = self.parts[:, :rows].ravel()


class Context:
    """Owns a llama_context with one pool of KV cells for all sequences. One thread at a time.

    `token`, `position`, `sequence` (int32) and `needs_output` (int8) are the batch, [capacity] each. A row belongs to
    one sequence; `needs_output` selects the rows whose logits (or embeddings) `rows` returns.
    """

    def __init__(
        self,
        weights: Weights,
        *,
        kv_tokens: int,
        sequences: int,
        batch_tokens: int,
        outputs: int,
        threads: int,
        kv_type: KVType = "f16",
        embeddings: bool = False,
    ) -> None:
        """Create the context. Raises EngineUnavailable, usually for lack of memory.

        Args:
            kv_tokens: KV cells of all sequences together.
            sequences: The maximal number of sequences.
            batch_tokens, outputs: Maximal rows of a batch, and of those that need an output.
            kv_type: The type of stored keys and values.
            embeddings: Return hidden states instead of logits.
        """
        params = native.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = kv_tokens, sequences, True
        params.n_batch = params.n_ubatch = batch_tokens
        params.n_outputs_max = max(outputs, sequences)  # llama.cpp refuses fewer than n_seq_max
        params.n_threads = params.n_threads_batch = threads
        # Flash attention skips other sequences' cells quickly; without it they cost as much as the sequence's own.
        params.flash_attn_type = _FLASH_AUTO
        params.type_k = params.type_v = _KV_TYPES[kv_type]
        params.no_perf = True
        params.embeddings = embeddings
        params.pooling_type = native.LLAMA_POOLING_TYPE_NONE
        self.pointer: bindings.Pointer = native.llama_init_from_model(weights.pointer, params)
        if not self.pointer:
            raise EngineUnavailable(
                f"{weights.path}: llama.cpp cannot make a context of {kv_tokens} tokens: {bindings.last_errors()}"
            )
        self.memory: bindings.Pointer = native.llama_get_memory(self.pointer)
        self.capacity = batch_tokens
        self._threads = threads
        self._adapter: Adapter | None = None
        self._width = (
            weights.embedding_dimensions
            if embeddings
            else int(native.llama_vocab_n_tokens(native.llama_model_get_vocab(weights.pointer)))
        )
        self._outputs = outputs
        self._read = bindings.get_embeddings if embeddings else bindings.get_logits
        self._address = 0
        self._rows: NDArray[np.float32] = np.zeros((0, self._width), np.float32)
        self._batch = batch = Batch(batch_tokens)
        self.token, self.position, self.sequence = batch.token, batch.position, batch.sequence
        self.needs_output = batch.needs_output
        self._weights = weights
        self._soft_batch: Batch | None = None

    def use_threads(self, threads: int) -> None:
        """Decode with this number of threads from now on."""
        if threads != self._threads:
            bindings.set_threads(self.pointer, threads, threads)
            self._threads = threads

    def use_adapter(self, adapter: Adapter | None) -> None:
        """Decode with this adapter from now on. After a change, llama.cpp builds its graph again."""
        if adapter is self._adapter:
            return
        adapters = (None, 0, None) if adapter is None else (adapter.pointers, 1, adapter.scales)
        if code := bindings.set_adapters(self.pointer, *adapters):
            raise EngineUnavailable(
                f"The adapter failed: llama_set_adapters_lora returned {code}: {bindings.last_errors()}"
            )
        self._adapter = adapter

    def decode(self, tokens: int) -> int:
        """Decode the first `tokens` rows of the batch: 0 done, 1 too few free KV cells, below 0 broken."""
        self._batch.native.n_tokens = tokens
        return bindings.decode(self.pointer, self._batch.native)

    @property
    def soft_batch(self) -> Batch:
        """The batch of soft tokens, created at its first use. None of its rows needs an output."""
        if self._soft_batch is None:
            weights = self._weights
            self._soft_batch = Batch(
                self.capacity, weights.input_dimensions, positions_have_parts=weights.positions_have_parts
            )
        return self._soft_batch

    def decode_soft(self, rows: int, *, causal: bool) -> int:
        """Decode the first rows of `soft_batch`; the codes are those of `decode`.

        `causal`: each vector attends to those before it, as tokens do; else all, of one sequence, attend to each other.
        """
        batch = self.soft_batch
        batch.finish(rows)
        if causal:
            return bindings.decode(self.pointer, batch.native)
        bindings.set_causal(self.pointer, False)
        try:
            return bindings.decode(self.pointer, batch.native)
        finally:
            bindings.set_causal(self.pointer, True)

    def rows(self, count: int) -> NDArray[np.float32]:
        """Return the outputs of the last decode in batch order: a writable float32 view [count, width]."""
        address = self._read(self.pointer)
        if address != self._address:
            size = self._outputs * self._width
            self._rows = np.ctypeslib.as_array((ctypes.c_float * size).from_address(address))
            self._rows = self._rows.reshape(self._outputs, self._width)
            self._address = address
        return self._rows[:count]

    def warm_up(self, token: int) -> None:
        """Decode one token and drop it, which loads the weights into memory and builds the compute graph."""
        self.token[0], self.position[0], self.sequence[0], self.needs_output[0] = token, 0, 0, 1
        # libgomp keeps the threads that it makes for a thread until that one ends. Were this thread's and those of the
        # thread that decodes later more than the cores, waiting threads would sleep at each of a step's many barriers.
        with ThreadPoolExecutor(1) as passing:
            code = passing.submit(self.decode, 1).result()
        bindings.sequence_remove(self.memory, 0, -1, -1)
        if code:
            raise EngineUnavailable(
                f"The model's first step failed: llama_decode returned {code}: {bindings.last_errors()}"
            )

    def close(self) -> None:
        if self.pointer:
            native.llama_free(self.pointer)
            self.pointer = 0
