"""The parts of a chat as text in its prompt (late fusion), before the request enters the queue of its own tier."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping

import msgspec

from models.modalities.graph.branch import Branch, Memory, PartMemory, ReadPart
from models.modalities.graph.facts import RequestFacts, summary, transcript_of
from models.modalities.graph.graph import EncoderGraph
from models.modalities.process.messages import Refusal
from models.modalities.process.parent import Tell, WorkerFailed
from router.errors import CausewayError, EncoderFailed, InvalidRequest
from router.openai.audio import Transcript, TranscriptionRequest
from router.parts.fusion import fuse
from router.types import AudioPart, Message, Modality, Request, RoutingHints, Transcripts

from ..core.late import LateReading
from ..core.request_context import DEGRADED, AnswerHead, RequestContext
from ..tiers.config import PartsConfig
from .encoders import EncoderTiers

HEADER = "x-causeway-modalities"


class ReadParts(msgspec.Struct, frozen=True):
    """The facts and readings of one request's parts."""

    request: Request
    found: RequestFacts
    written: Request  # with its parts as text

    def for_model(self, transcripts: Transcripts) -> Request:
        """Return the request with its parts as text, in the form that a model reads transcripts."""
        if transcripts == "written":
            return self.written
        return fuse(self.request, self.found.facts, self.found.kinds, transcripts)

    def mark(self, head: AnswerHead) -> AnswerHead:
        """Write the status of each part into an answer's head; without one of them the answer is degraded."""
        complete = all(record.status == "ok" for record in self.found.records)
        headers = (*head.headers, (HEADER, summary(self.found.records)))
        if not complete and DEGRADED not in headers:
            headers = (*headers, DEGRADED)
        return msgspec.structs.replace(head, headers=headers, keep=head.keep and complete)


class RequestParts:
    """Reads the parts of requests.

    Args:
        private: whether nothing of a request may be remembered.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        encoders: EncoderTiers,
        config: PartsConfig,
        private: Callable[[Request], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._encoders = encoders
        self._config = config
        self._private = private
        self._clock = clock
        self._memories = TenantMemories(config, clock)

    @property
    def kinds(self) -> tuple[Modality, ...]:
        """The kinds that are read."""
        return self._encoders.kinds

    @property
    def max_parts(self) -> int:
        """How many parts a request may have."""
        return self._config.max_parts

    def session_memory(self) -> PartMemory:
        """Return what a live session may remember: it ends with the session."""
        return PartMemory(self._config.max_parts)

    def at_speech_tier(self, context: RequestContext) -> RequestContext:
        """Return the context at the tier that reads the sounds of messages."""
        return msgspec.structs.replace(context, tier=self._encoders.tier(self._encoders.tier_of("audio")))

    async def read(self, context: RequestContext) -> ReadParts:
        """Run a branch for each part, side by side, each with its own deadline. Cancelling cancels them.

        Raises:
            InvalidRequest: a part is invalid; the message names it.
            EncoderFailed: nothing is left of the request's last message.
        """
        if context.late is None:
            graph = self._graph(self._encoders.branches(context), self._memory(context))
            found = await graph.facts(context.request, context.deadline)
        else:
            found = await context.late.facts(context.deadline)
        return ReadParts(context.request, found, fuse(context.request, found.facts, found.kinds))

    def read_late(self, context: RequestContext, by: float) -> LateReading:
        """Return what reads the parts of a job, those that are late until `by` (monotonic s)."""
        memory = JobMemory(self._memory(context), self._config.max_parts)
        return LateReading(self._graph(self._encoders.branches(context), memory), context.request, by)

    async def transcribe(
        self, context: RequestContext, request: TranscriptionRequest, tell: Tell | None = None, param: str = "file"
    ) -> Transcript:
        """Return the words of a sound by the context's tier; none without speech.

        Args:
            tell: gets each segment as soon as it is understood, unless all of it was known; may not raise.
            param: the sound's name in errors.

        Raises:
            CausewayError: the error for the client.
        """
        tier = context.tier
        # Another tier runs another model: its facts are kept apart.
        memory_of = "" if tier.name == self._encoders.tier_of("audio") else tier.name
        branches: dict[Modality, Branch] = {"audio": self._encoders.branch("audio", tier, context)}
        graph = self._graph(branches, self._memory(context, memory_of))
        try:
            found, seconds, _ = await graph.transcribe(request, context.deadline, tell)
        except Refusal as refusal:
            wrong = refusal.param or param
            raise InvalidRequest(f"`{wrong}`: {refusal}.", param=wrong) from None
        except WorkerFailed as failure:
            if isinstance(failure.__cause__, CausewayError):
                raise failure.__cause__ from None
            raise EncoderFailed(f"the sound could not be read: {failure}. Send it again.") from None
        return transcript_of(found, seconds, words=request.words)

    def _memory(self, context: RequestContext, tier: str = "") -> Memory:
        """`tier`: if it is not the one that reads such parts in messages."""
        if context.memory is not None:
            return context.memory
        return FORGETS if self._private(context.request) else self._memories.of(context.tenant, tier)

    def _graph(self, branches: Mapping[Modality, Branch], memory: Memory) -> EncoderGraph:
        return EncoderGraph(branches, memory, max_parts=self._config.max_parts, clock=self._clock)


def sound_request(model: str, hints: RoutingHints, *, stream: bool = False) -> Request:
    """Return a sound that is to be understood as the request that is admitted for it."""
    return Request(
        kind="chat",
        model=model,
        messages=(Message("user", (AudioPart("", "wav"),)),),
        max_tokens=1,  # it generates none
        stream=stream,
        hints=hints,
    )


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
    """A memory for each tenant: it gets facts only about parts that it has sent itself.

    They are in this gateway's memory alone, by hash, and for some minutes.
    """

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
