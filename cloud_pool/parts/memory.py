"""Facts about earlier parts, by tenant and hash; in this gateway's memory only, and for some minutes."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from models.modalities.graph.branch import Memory, PartMemory, ReadPart
from router.types import Modality

from .config import PartsConfig

_Owner = tuple[str, str]  # tenant and tier
FORGETS = PartMemory(0)
"""Keeps nothing: for private requests."""


class JobMemory:
    """What a job finds in its own parts, for its revisions, beside what its tenant may know."""

    def __init__(self, shared: Memory, max_parts: int) -> None:
        self._shared = shared
        self._own = PartMemory(max_parts)

    def find(self, reader: Modality, sha256: str) -> ReadPart | None:
        return self._own.find(reader, sha256) or self._shared.find(reader, sha256)

    def keep(self, reader: Modality, sha256: str, read: ReadPart) -> None:
        self._own.keep(reader, sha256, read)
        self._shared.keep(reader, sha256, read)


class TenantMemories:
    """A memory for each tenant: it gets facts only about parts that it has sent itself."""

    def __init__(self, config: PartsConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._kept: OrderedDict[tuple[_Owner, Modality, str], tuple[float, ReadPart]] = OrderedDict()

    def of(self, tenant: str, tier: str = "") -> Memory:
        """Return a tenant's memory of what `tier` found; "": what the tiers that read the parts of messages found."""
        return _TenantMemory(self, (tenant, tier))

    def find(self, owner: _Owner, reader: Modality, sha256: str) -> ReadPart | None:
        until, read = self._kept.get((owner, reader, sha256), (0.0, None))
        return read if self._clock() < until else None

    def keep(self, owner: _Owner, reader: Modality, sha256: str, read: ReadPart) -> None:
        self._kept.pop((owner, reader, sha256), None)
        self._kept[owner, reader, sha256] = self._clock() + self._config.remembered_s, read
        if len(self._kept) > self._config.remembered:
            self._kept.popitem(last=False)


class _TenantMemory:
    def __init__(self, memories: TenantMemories, owner: _Owner) -> None:
        self._memories = memories
        self._owner = owner

    def find(self, reader: Modality, sha256: str) -> ReadPart | None:
        return self._memories.find(self._owner, reader, sha256)

    def keep(self, reader: Modality, sha256: str, read: ReadPart) -> None:
        self._memories.keep(self._owner, reader, sha256, read)
