"""The parts of one job, which are read on after its answer was made without them."""

from __future__ import annotations

from collections.abc import Sequence

from causeway_server.models.parts.graph.graph import EncoderGraph, RequestFacts
from causeway_server.router.jobs.job import LateTerms, check_read
from causeway_server.router.types import Modality, PartRecord, Request


class LateReading:
    """What is found of one job's parts, for its answer and for the revisions of it. `close` ends what is being read.

    Args:
        graph: of this job alone.
        by: how long parts are read, monotonic s.
    """

    def __init__(self, graph: EncoderGraph, request: Request, by: float) -> None:
        self._graph = graph
        self._request = request
        self._terms = LateTerms(by)
        self.records: tuple[PartRecord, ...] = ()  # of the last answer; none if that came from the cache

    @property
    def by(self) -> float:
        """How long parts are read, monotonic s."""
        return self._terms.by

    async def facts(self, deadline: float) -> RequestFacts:
        """Return what an answer is made with. A part that is late is read on. Raises InvalidRequest.

        Args:
            deadline: of the answer, monotonic s.
        """
        found = await self._graph.facts(self._request, deadline, late=self._terms)
        self.records = found.records
        return found

    def leave_out(self, kinds: Sequence[Modality]) -> None:
        """Let the next answer be made without parts of these kinds."""
        self.records = ()
        self._terms = LateTerms(self.by, tuple(kinds))

    async def read(self, kind: Modality) -> None:
        """Wait until the parts of one kind have been read. Raises RevisionDropped or InvalidRequest."""
        found = await self._graph.late_facts(self._request, self.by, (kind,))
        check_read(found.records, kind)

    async def close(self) -> None:
        """End what is being read."""
        await self._graph.close()
