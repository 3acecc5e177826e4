"""Running sequences by adapter: those of one adapter are decoded together, and adapters take turns.

llama.cpp applies an adapter to a whole llama_decode. After a change it builds its graph anew (measured on a 0.5B: 5 ms
beside steps of 35 ms), so a turn lasts for several steps.
"""

from __future__ import annotations

from ..native.weights import Adapter
from .sequence import Sequence

_TURN_S = 0.1  # a reader sees no gap, and a change of adapters costs a small share


class AdapterGroup:
    """The running sequences of one adapter; None: of the model as it is. `decoding` is in batch order."""

    __slots__ = ("adapter", "decoding", "last_tokens", "name", "prefilling")

    def __init__(self, name: str, adapter: Adapter | None) -> None:
        self.name = name
        self.adapter = adapter
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self.last_tokens: list[int] = []  # the token that each decoding sequence feeds next

    def __len__(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    @property
    def running(self) -> list[Sequence]:
        return [*self.decoding, *self.prefilling]


class AdapterTurns:
    """The groups with running sequences, and `current`, whose turn it is."""

    def __init__(self) -> None:
        self.current = AdapterGroup("", None)
        self._groups = {"": self.current}  # by the adapter's name; after the current one, the longest waiting first
        self._end = 0.0

    def __len__(self) -> int:
        """Count the running sequences."""
        return sum(map(len, self._groups.values()))

    @property
    def groups(self) -> list[AdapterGroup]:
        return list(self._groups.values())

    def group_of(self, sequence: Sequence) -> AdapterGroup:
        """Return the sequence's group, which is created for its first sequence."""
        name = sequence.job.adapter
        if name not in self._groups:
            self._groups[name] = AdapterGroup(name, sequence.adapter)
        return self._groups[name]

    def is_over(self, now: float) -> bool:
        """Return whether the turn ends: at its time, or with the last sequence of its group. `now`: seconds."""
        return len(self._groups) > 1 and not (self.current and now < self._end)

    def pass_on(self, now: float) -> bool:
        """Begin the next turn; return whether it is another group's. `now`: seconds."""
        last = self.current
        order = [*(name for name in self._groups if self._groups[name] is not last), last.name]
        self._groups = {name: self._groups[name] for name in order if self._groups[name]}
        self.current = next(iter(self._groups.values()), last)
        self._end = now + _TURN_S
        return self.current is not last
