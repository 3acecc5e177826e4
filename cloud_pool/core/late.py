"""The parts of one job that are still being read after its first answer was made without them."""

from __future__ import annotations

from collections.abc import Sequence

from causeway_server.models.parts.graph.graph import EncoderGraph, RequestFacts
from causeway_server.router.jobs.job import ReadingLimits, check_read
from causeway_server.router.types import Modality, PartRecord, Request


class DeferredParts:
    """The parts of one job, for its answer and for its revisions. `close` ends the reading.

    Args:
        graph: Encoder graph of this job alone.
        by: Time until which parts are read, monotonic seconds.
    """

    def __init__(self, graph: EncoderGraph, request: Request, by: float) -> None:
        self._graph = graph
        self._request = request
        self._limits = ReadingLimits(by)
        self.records: tuple[PartRecord, ...] = ()  # of the last answer; none if that came from the cache

    @property
    def by(self) -> float:
        """The time until which parts are read, in monotonic seconds."""
        return self._limits.by

    async def facts(self, deadline: float) -> RequestFacts:
        """Return the facts for an answer; late parts continue to be read. Raises InvalidRequest.

        Args:
            deadline: Deadline of the answer, monotonic seconds.
        """
        facts = await self._graph.facts(self._request, deadline, late=self._limits)
        self.records = facts.records
        return facts

    def leave_out(self, kinds: Sequence[Modality]) -> None:
        """Allow the next answer to be made without parts of these kinds."""
        self.records = ()
        self._limits = ReadingLimits(self.by, tuple(kinds))

    async def read(self, kind: Modality) -> None:
        """Wait until the parts of one kind have been read. Raises RevisionDropped or InvalidRequest."""
        found = await self._graph.late_facts(self._request, self.by, (kind,))
        check_read(found.records, kind)

    async def close(self) -> None:
        """End the reading of parts."""
        await self._graph.close()
