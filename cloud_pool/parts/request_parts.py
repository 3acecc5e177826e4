"""The parts of a chat as text in its prompt (late fusion), before the request enters the queue of its own tier.

Encoder tiers are branches of the encoder graph: a part goes through a tier's admission and dispatch as a prompt does.

    part ── permit of the tier ── endpoint ── Triton: decoder child, encoder child ── fact

A file that cannot be read is the client's error and does not affect the tier's health. Only a fault of the tier itself
(no capacity, no endpoint, a dead process) counts as its failure, for its breaker, retries and repair.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

import msgspec

from causeway_server.models.parts.graph.branch import PLAIN, Branch, Memory, PartMemory, ReadPart
from causeway_server.models.parts.graph.graph import EncoderGraph, RequestFacts, summary, transcript_of
from causeway_server.models.parts.process.messages import AudioTerms, Refusal, Refused, SegmentFound
from causeway_server.models.parts.process.parent import Tell, WorkerFailed, WorkerTimeout
from causeway_server.router import errors
from causeway_server.router.openai.audio import Transcript, TranscriptionRequest
from causeway_server.router.parts.reading import Form, find_parts, fuse
from causeway_server.router.types import AudioPart, Message, Modality, Request, RoutingHints

from ..core.request_context import DEGRADED, AnswerHead, RequestContext
from ..degradation.fallback import TierFallback
from ..degradation.tier_attempt import TierAttempt, TierFailed, TierRuntime, sole_attempt
from ..tiers.config import PartsConfig
from ..tiers.tier import Tier, encoders_of
from ..upstreams.inference import Delta, EncodePart, InferenceRequest
from ..upstreams.triton.messages import EncodeJob, PartFailed, PartRead, PartReply, SamplingParameters, read_reply

HEADER = "x-causeway-modalities"
FORGETS = PartMemory(0)
"""A memory that stores nothing, for private requests."""


class TierBranch:
    """Reads one kind of part with a tier, for one request (a `Branch`). The tier's error is WorkerFailed's cause."""

    def __init__(
        self,
        kind: Modality,
        context: RequestContext,
        timeout_s: float,
        language: str,
        attempt: Callable[[RequestContext], TierAttempt],
    ) -> None:
        self.timeout_s = timeout_s
        self._kind = kind
        self._context = context
        self._language = language
        self._attempt = attempt

    async def run(self, part: bytes, deadline: float, terms: AudioTerms = PLAIN, tell: Tell | None = None) -> ReadPart:
        """Read the part, like `Branch.run`."""
        language, wants_segments = terms.language or self._language, tell is not None
        encode = EncodeJob(self._kind, language, terms.prompt, terms.temperature, wants_segments, terms.words)
        context = msgspec.structs.replace(self._context, deadline=deadline)
        request = InferenceRequest(
            model=context.tier.model,
            prompt="",
            parameters=SamplingParameters(),
            part=EncodePart(encode, part),
            deadline=deadline,
            request_id=context.id,
            traceparent=context.traceparent,
            trace=context.trace,
        )
        try:
            read = await self._read(context, request, tell)
            self._context.meter.audio_ms += round(read.seconds * 1000.0)
            return read
        except TierFailed as failure:
            raise _unread(failure.error) from failure.error
        except errors.CausewayError as error:
            raise _unread(error) from error

    async def _read(self, context: RequestContext, request: InferenceRequest, tell: Tell | None) -> ReadPart:
        attempt = self._attempt(context)
        untraced = msgspec.structs.replace(context, trace=None)  # its wait is the request's own tier's
        async with attempt:
            _, delta = await attempt.begin(untraced, lambda: [request], b"")
            assert attempt.stream is not None
            found = _taken(_reply(delta), tell)
            async for delta in attempt.stream:
                found = found or _taken(_reply(delta), tell)
        if found is None:
            raise errors.CloudFailed("The encoder ended without an answer.", phase="stream")
        return found


def _reply(delta: Delta) -> PartReply | None:
    """Return the reply in a delta; None at the end of the call. Raises CloudFailed."""
    try:
        return read_reply(delta.text) if delta.text else None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise errors.CloudFailed(
            f"The tier's model does not answer as an encoder of Causeway does: {error}", phase="first_token"
        ) from None


def _taken(reply: PartReply | None, tell: Tell | None) -> ReadPart | None:
    """Return the part that was read; None for another reply. Raises Refusal, WorkerTimeout, WorkerFailed."""
    if isinstance(reply, SegmentFound) and tell is not None:
        tell(reply.segment)
    if isinstance(reply, Refused):
        raise Refusal(reply.reason, reply.param)
    if isinstance(reply, PartFailed):
        raise (WorkerTimeout if reply.late else WorkerFailed)(reply.reason)
    return ReadPart(reply.found, reply.seconds) if isinstance(reply, PartRead) else None


def _unread(error: errors.CausewayError) -> WorkerFailed:
    late = isinstance(error, (errors.DeadlineExceeded, errors.CloudTimeout))
    return (WorkerTimeout if late else WorkerFailed)(f"{error.code}: {error.message}")


class ReadParts(msgspec.Struct, frozen=True):
    """The facts and readings of one request's parts."""

    request: Request
    found: RequestFacts
    written: Request  # request with its parts as text

    def as_text(self, form: Form) -> Request:
        """Return the request with its parts as text, transcripts in this form."""
        return self.written if form == "written" else fuse(self.request, self.found.facts, self.found.kinds, form)

    def mark(self, head: AnswerHead) -> AnswerHead:
        """Write the status of each part into an answer's head; if a part is missing, the answer is degraded."""
        complete = all(record.status == "ok" for record in self.found.records)
        headers = (*head.headers, (HEADER, summary(self.found.records)))
        if not complete and DEGRADED not in headers:
            headers = (*headers, DEGRADED)
        return msgspec.structs.replace(head, headers=headers, keep=head.keep and complete)


class RequestParts:
    """Reads the parts of requests. `fallback` records outcomes; `private`: no data of a request may be stored."""

    def __init__(
        self,
        runtimes: Mapping[str, TierRuntime],
        fallback: TierFallback,
        config: PartsConfig,
        private: Callable[[Request], bool],
    ) -> None:
        self._runtimes = runtimes
        self._fallback = fallback
        self._config = config
        self._private = private
        self._memory = PartMemory(config.fact_cache_entries, config.fact_cache_ttl_s)
        self._by_kind = encoders_of(runtime.tier for runtime in runtimes.values())
        self.kinds: tuple[Modality, ...] = tuple(self._by_kind)

    @property
    def max_parts(self) -> int:
        """The maximum number of parts of a request."""
        return self._config.max_parts

    def session_memory(self) -> PartMemory:
        """Return the memory of a live session, which ends with the session."""
        return PartMemory(self._config.max_parts)

    def at_speech_tier(self, context: RequestContext) -> RequestContext:
        """Return the context at the tier that reads the audio of messages."""
        return msgspec.structs.replace(context, tier=self._tier("audio"))

    def check_native(self, request: Request, native: Collection[Modality]) -> None:
        """Check the parts that a model gets itself: a bounded number, and nothing is fetched. Raises InvalidRequest."""
        find_parts(request, tuple(native), self._config.max_parts)

    async def read(self, context: RequestContext, native: Collection[Modality] = ()) -> ReadParts:
        """Run a branch for each part but the `native` kinds, concurrently, each with its own deadline.

        Raises InvalidRequest, which names the part, or EncoderFailed if nothing is left of the request's last message.
        """
        kinds = tuple(kind for kind in sorted(self.kinds) if kind not in native)
        graph = self._graph(self._branches(context), self._known_to(context))
        facts = await graph.facts(context.request, context.deadline, kinds)
        return ReadParts(context.request, facts, fuse(context.request, facts.facts, facts.kinds))

    async def transcribe(
        self, context: RequestContext, request: TranscriptionRequest, tell: Tell | None = None, param: str = "file"
    ) -> Transcript:
        """Return the transcript of audio by the context's tier; empty if there is no speech. Raises CausewayError.

        Args:
            tell: Callback for each segment as soon as it is transcribed, unless the clip was cached; must not raise.
            param: Name of the audio in errors.
        """
        tier = context.tier
        # Another tier runs another model: its facts are kept apart.
        memory_of = "" if tier.name == self._by_kind["audio"] else tier.name
        graph = self._graph({"audio": self._branch("audio", tier, context)}, self._known_to(context, memory_of))
        try:
            found, seconds, _ = await graph.transcribe(request, context.deadline, tell)
        except Refusal as refusal:
            wrong = refusal.param or param
            raise errors.InvalidRequest(f"`{wrong}`: {refusal}.", param=wrong) from None
        except WorkerFailed as failure:
            if isinstance(failure.__cause__, errors.CausewayError):
                raise failure.__cause__ from None
            raise errors.EncoderFailed(f"The audio could not be read: {failure}. Send the audio again.") from None
        return transcript_of(found, seconds, words=request.words)

    def _known_to(self, context: RequestContext, tier: str = "") -> Memory:
        """Return the memory of the caller's parts. `tier`: set if a tier other than the default one reads them."""
        if context.memory is not None:
            return context.memory
        return FORGETS if self._private(context.request) else TenantMemory(self._memory, context.tenant, tier)

    def _tier(self, kind: Modality) -> Tier:
        """Return the tier that reads this kind of part in messages."""
        return self._runtimes[self._by_kind[kind]].tier

    def _branches(self, context: RequestContext) -> dict[Modality, Branch]:
        """Return the branches for a request, by kind of part."""
        return {kind: self._branch(kind, self._tier(kind), context) for kind in self.kinds}

    def _branch(self, kind: Modality, tier: Tier, context: RequestContext) -> Branch:
        """Return the branch for a request's parts of this kind, at a tier that reads them."""
        config = self._config
        timeout_s = config.audio_timeout_s if kind == "audio" else config.image_timeout_s
        # One sequence for each part, whatever the request itself asks for; its trace has the spans of the calls.
        request = msgspec.structs.replace(context.request, n=1, prompts=())
        part_context = msgspec.structs.replace(context, tier=tier, request=request, tokens=1.0)
        return TierBranch(kind, part_context, timeout_s, config.language, self._attempt)

    def _attempt(self, context: RequestContext) -> TierAttempt:
        return sole_attempt(context, self._runtimes, self._fallback, time.monotonic)

    def _graph(self, branches: Mapping[Modality, Branch], memory: Memory) -> EncoderGraph:
        return EncoderGraph(branches, memory, max_parts=self._config.max_parts, clock=time.monotonic)


def audio_request(model: str, hints: RoutingHints, *, stream: bool = False) -> Request:
    """Return the request under which audio is admitted for transcription."""
    return Request(
        kind="chat",
        model=model,
        messages=(Message("user", (AudioPart("", "wav"),)),),
        max_tokens=1,  # it generates none
        stream=stream,
        hints=hints,
    )


class TenantMemory:
    """A tenant's memory of facts about parts that it has sent itself, by hash, in this gateway for some minutes.

    `tier`: it found the facts; "": the tiers that read the parts of messages.
    """

    def __init__(self, shared: PartMemory, tenant: str, tier: str = "") -> None:
        self._shared = shared
        self._owner = f"{tenant}\0{tier}\0"

    def find(self, reader: Modality, sha256: str) -> ReadPart | None:
        return self._shared.find(reader, self._owner + sha256)

    def keep(self, reader: Modality, sha256: str, read: ReadPart) -> None:
        self._shared.keep(reader, self._owner + sha256, read)
