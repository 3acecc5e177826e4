"""The states of rows below a student's first layer with an adapter: no step changes them, so each is computed once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .network import Student

Row = tuple[int, ...]


class RowStates:
    """Computes states, and keeps them up to a limit; beyond it they are computed again. Threads may share it.

    Args:
        prefix: The tokens with which all rows begin.
        limit_bytes: The memory for the states.
    """

    def __init__(self, student: Student, prefix: Row, limit_bytes: int) -> None:
        self.prefix = prefix
        self._student, self._limit_bytes = student, limit_bytes
        self._known: dict[Row, Tensor] = {}
        self._bytes = 0
        self._head = student.lower(prefix, torch.zeros(1, 1, dtype=torch.int64))[: len(prefix)]

    def of(self, rows: Sequence[Row]) -> Tensor:
        """Return the states of the prefix and of `rows`, its continuations, [prefix + rows * length, width]; a shorter
        row is padded at its end.
        """
        made = self._compute([row for row in dict.fromkeys(rows) if row not in self._known])
        found = [made[row] if row in made else self._known[row] for row in rows]
        if self._student.first_layer and self._bytes < self._limit_bytes:
            self._known.update(made)
            self._bytes += sum(one.nbytes for one in made.values())
        return torch.cat((self._head, pad_sequence(found, batch_first=True).flatten(0, 1)))

    def _compute(self, rows: Sequence[Row]) -> dict[Row, Tensor]:
        if not rows:
            return {}
        ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        states = self._student.lower(self.prefix, ids)[len(self.prefix) :].unflatten(0, ids.shape)
        return {row: one[: len(row)].clone() for row, one in zip(rows, states, strict=True)}
