"""The slots of a worker: how many jobs of a tier it may run now, and which priority a free one prefers."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle, islice
from typing import Final, Protocol

import anyio

from ...admission import Priority

_LETTERS: Final[Mapping[str, Priority]] = {"i": "interactive", "s": "standard", "b": "bulk"}
TURNS: Final = tuple(_LETTERS[letter] for letter in "isiibisiiisi")
"""Which priority free slots prefer, in turn: 8 interactive, 3 standard, 1 bulk. So bulk jobs are slow but never starve.

The order is that of nginx's smooth weighted round robin: upstream module, commit
52327e0627f49dbda1e8db695e63a4b0af4448b1.
"""
_LIMIT_POLL_S = 0.25  # the shared limit changes twice a second


class SharedLimit(Protocol):
    """This worker's part of a tier's permits: `admission.AdmissionController`."""

    wants_more: bool

    @property
    def limit(self) -> int:
        """Sequences that may run."""

    @property
    def demand(self) -> int:
        """Sequences that run or wait."""


class WorkerSlots:
    """The slots of one tier in this worker: `count`, or fewer where its part of the tier's permits is smaller."""

    def __init__(self, tier: str, count: int, shared_limit: SharedLimit | None = None) -> None:
        self.tier = tier
        self._count = count
        self._shared_limit = shared_limit
        self._used = 0
        self._turns = cycle(TURNS)
        self.tier_unavailable = False
        self._slot_released = anyio.Event()
        self.set_wants_more(True)  # until the first claim

    @property
    def free(self) -> int:
        free = self._count - self._used
        if self._shared_limit is None:
            return free
        # A job may be of several sequences, and it is not in admission from its first moment on.
        return min(free, self._shared_limit.limit - max(self._used, self._shared_limit.demand))

    def set_wants_more(self, more: bool) -> None:
        """Record whether more jobs may be queued than were claimed."""
        if self._shared_limit is not None:
            self._shared_limit.wants_more = more

    def preferred(self, slots: int) -> tuple[Priority, ...]:
        """Return the preferred priority of each slot. Slots of a priority without jobs go to the most urgent others."""
        return tuple(islice(self._turns, slots))

    def acquire(self) -> None:
        """Take a slot."""
        self._used += 1

    def release(self) -> None:
        """Return a slot."""
        self._used -= 1
        self._slot_released.set()
        self._slot_released = anyio.Event()

    async def wait_for_slot(self) -> None:
        """Wait until a slot is free."""
        while self.free <= 0:
            with anyio.move_on_after(_LIMIT_POLL_S):
                await self._slot_released.wait()
