"""A llama_batch over numpy arrays: writing a row copies and allocates nothing."""

from __future__ import annotations

import ctypes

import llama_cpp.llama_cpp as native
import numpy as np

_INT32 = ctypes.POINTER(ctypes.c_int32)


class Batch:
    """Rows of tokens, or of vectors in their place: llama.cpp takes either, never both.

    `position`, `sequence` (int32) and `needs_output` (int8) are [rows] each. A row belongs to one sequence. `token`:
    int32 [rows]; `vector`: float32 [rows, dimensions].
    """

    def __init__(self, rows: int, dimensions: int = 0) -> None:
        """`dimensions`: of vectors; 0: the batch is of tokens."""
        self.token = np.zeros(rows, np.int32)
        self.vector = np.zeros((rows, dimensions), np.float32)
        self.position = np.zeros(rows, np.int32)
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
