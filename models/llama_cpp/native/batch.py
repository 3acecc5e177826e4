"""A llama_batch over numpy arrays: writing a row copies and allocates nothing."""

from __future__ import annotations

import ctypes

import llama_cpp.llama_cpp as native
import numpy as np
from numpy.typing import NDArray

_INT32 = ctypes.POINTER(ctypes.c_int32)
_PARTS = 4  # of a position: llama.h has time, row, column and one that stays 0


class Batch:
    """Rows of tokens, or of vectors in their place: llama.cpp takes either, never both.

    `position`, `sequence` (int32) and `needs_output` (int8) are [rows] each. A row belongs to one sequence. `token`:
    int32 [rows]; `vector`: float32 [rows, dimensions]; `parts`: of the vectors' positions, int32 [4, rows], where they
    have parts.
    """

    def __init__(self, rows: int, dimensions: int = 0, *, positions_have_parts: bool = False) -> None:
        """`dimensions`: of vectors; 0: the batch is of tokens."""
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
        """Write the positions of vectors.

        Args:
            first: position of the first one.
            offsets: from there, int32 [3, rows]; None: one after the other.
        """
        count = rows.stop - rows.start
        if self.parts is None:
            self.position[rows] = range(first, first + count)
        else:
            self.parts[:3, rows] = first + (np.arange(count, dtype=np.int32) if offsets is None else offsets)

    def finish(self, rows: int) -> None:
        """Make the batch one of `rows` rows: llama.cpp wants all first parts of positions, then all second ones."""
        self.native.n_tokens = rows
        if self.parts is not None:
            self.position[: _PARTS * rows] = self.parts[:, :rows].ravel()
