"""What was found of earlier parts, by the hash of a part; in memory only."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from router.types import Modality

from .branch import ReadPart


class Memory(Protocol):
    """Remembers what was found, for those that may know it."""

    def find(self, reader: Modality, sha256: str) -> ReadPart | None: ...

    def keep(self, reader: Modality, sha256: str, read: ReadPart) -> None: ...


class PartMemory:
    """A memory of all parts of a process. `limit`: parts; the one that was kept first is forgotten."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[tuple[Modality, str], ReadPart] = OrderedDict()

    def find(self, reader: Modality, sha256: str) -> ReadPart | None:
        return self._kept.get((reader, sha256))

    def keep(self, reader: Modality, sha256: str, read: ReadPart) -> None:
        self._kept[reader, sha256] = read
        if len(self._kept) > self._limit:
            self._kept.popitem(last=False)
