"""Which offset of a partition may be committed: the end of what is acknowledged without a gap. Pure."""

from __future__ import annotations


class ContiguousOffsets:
    """Offsets of one partition. Commits cover everything below them, and messages end in any order."""

    def __init__(self) -> None:
        self._open: set[int] = set()
        self._next: int | None = None  # behind the last delivery
        self._committed: int | None = None

    @property
    def unacknowledged(self) -> int:
        return len(self._open)

    def deliver(self, offset: int) -> None:
        """A message was received."""
        self._open.add(offset)
        self._next = max(offset + 1, self._next or 0)

    def acknowledge(self, offset: int) -> None:
        """A message is done."""
        self._open.discard(offset)

    @property
    def floor(self) -> int | None:
        """The first offset that is not acknowledged; None before the first delivery."""
        return min(self._open, default=self._next)

    def to_commit(self) -> int | None:
        """Return the offset to commit; None if it is committed already."""
        return None if self.floor == self._committed else self.floor

    def committed(self, offset: int) -> None:
        self._committed = offset

    def forget(self) -> None:
        """What was delivered and not acknowledged comes again, from `floor` on."""
        self._next = self.floor
        self._open.clear()
