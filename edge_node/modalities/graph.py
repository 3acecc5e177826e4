"""The encoder graph of a request: a branch per part, decoder then encoder, all branches at the same time.

    part ── decoder child ── encoder child ── fact       each branch has its own deadline
                                                          cancelled with the request

A part that is invalid is the client's error. A branch that is late or whose child dies leaves its fact out: the request
goes on with what is there, and says so (`x-causeway-modalities`, and the decision record). Facts are remembered by the
hash of the part, in memory only. A part's bytes are nowhere but in the request.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from models.modalities.process.messages import (
    DecodePicture,
    DecodeSound,
    Found,
    PartLimits,
    Picture,
    Refusal,
    Sound,
    Transcribe,
    WorkerSpec,
)
from models.modalities.process.parent import WorkerFailed, WorkerProcess, WorkerTimeout
from router.errors import InvalidRequest
from router.openai.audio import TranscriptionRequest
from router.parts.fusion import fuse
from router.parts.reading import FoundPart, find_parts, has_parts
from router.types import Fact, Modality, PartRecord, PartStatus, Request, Transcripts

from ..clock import Clock
from ..config.schema import ModalitiesConfig

if TYPE_CHECKING:
    from ..serving.generation import Generation

log = logging.getLogger(__name__)

_DECODER = "models.modalities.decoding.decoder:PartDecoder"
_WORST: tuple[PartStatus, ...] = ("failed", "timeout", "ok")


class RequestFacts(msgspec.Struct, frozen=True):
    """What the encoders found in one request. A fact is None if its branch did not end in time."""

    facts: dict[tuple[int, int], Fact | None]  # by message and index of the part
    records: tuple[PartRecord, ...]

    @property
    def summary(self) -> str:
        """The state of each kind of part, ``audio=ok,image=timeout``: the worst of its parts."""
        found: dict[Modality, set[PartStatus]] = {}
        for record in self.records:
            found.setdefault(record.modality, set()).add(record.status)
        worst = {kind: next(status for status in _WORST if status in found[kind]) for kind in sorted(found)}
        return ",".join(f"{kind}={status}" for kind, status in worst.items())

    @property
    def complete(self) -> bool:
        return all(record.status == "ok" for record in self.records)


class _Branch:
    """Decoder and encoder of one kind of part, each a child that starts with the first part."""

    def __init__(self, encoder: WorkerSpec, limits: PartLimits, memory_bytes: int, timeout_s: float) -> None:
        self.decoder = WorkerProcess(WorkerSpec(_DECODER, limits, memory_bytes=memory_bytes))
        self.encoder = WorkerProcess(encoder)
        self.timeout_s = timeout_s

    async def run(self, job: DecodeSound | DecodePicture, deadline: float) -> Fact:
        """Raises Refusal, WorkerTimeout or WorkerFailed."""
        decoded = await self.decoder.run(job, deadline)
        assert isinstance(decoded, Sound | Picture)
        encoded = Transcribe(decoded) if isinstance(decoded, Sound) else decoded
        found = await self.encoder.run(encoded, deadline)
        assert isinstance(found, Found)
        return found.fact

    async def hear(self, request: TranscriptionRequest, deadline: float) -> tuple[Sound, Found]:
        """Raises as `run`."""
        sound = await self.decoder.run(DecodeSound(request.data), deadline)
        assert isinstance(sound, Sound)
        job = Transcribe(sound, request.language, request.prompt, request.temperature)
        found = await self.encoder.run(job, deadline)
        assert isinstance(found, Found)
        return sound, found

    async def close(self) -> None:
        await self.decoder.close()
        await self.encoder.close()


class EncoderGraph:
    """The encoders of this box.

    Args:
        encoders: what to run, by kind of part.
        transcripts: the form in which a model reads what was said.
    """

    def __init__(
        self,
        encoders: Mapping[Modality, WorkerSpec],
        config: ModalitiesConfig,
        clock: Clock,
        transcripts: Callable[[str], Transcripts] = lambda _: "written",
    ) -> None:
        limits = PartLimits(config.max_audio_s, config.max_pixels)
        timeouts: dict[Modality, float] = {"audio": config.audio_timeout_s, "image": config.image_timeout_s}
        self.kinds: tuple[Modality, ...] = tuple(sorted(encoders))
        self._branches = {
            kind: _Branch(spec, limits, config.decoder_memory_bytes, timeouts[kind]) for kind, spec in encoders.items()
        }
        self._config = config
        self._clock = clock
        self._transcripts = transcripts
        self._remembered: OrderedDict[tuple[Modality, str], Fact] = OrderedDict()
        self.running = 0  # branches in progress

    def concerns(self, request: Request) -> bool:
        """Whether the request has a part that an encoder of this box reads."""
        return request.kind == "chat" and has_parts(request, self.kinds)

    async def fuse(self, generation: Generation, kinds: Sequence[Modality], model: str) -> Request:
        """Return the generation's request with its parts of these kinds as text for `model`; its branches run once.

        Raises:
            InvalidRequest: a part is invalid, or nobody speaks in a request that is one sound.
            EncoderFailed: nothing is left of the request's last message.
        """
        if generation.facts is None:
            generation.facts = await self.facts(generation.request, generation.deadline)
        return fuse(generation.request, generation.facts.facts, kinds, self._transcripts(model))

    async def facts(self, request: Request, deadline: float) -> RequestFacts:
        """Run all branches of the request and return what they found in time.

        Args:
            deadline: monotonic seconds; each branch also has its own.

        Raises:
            InvalidRequest: a part is invalid; the message names it.
        """
        parts = find_parts(request, self.kinds, self._config.max_parts)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._branch(part, deadline)) for part in parts]
        outcomes = [task.result() for task in running]
        for outcome in outcomes:
            if isinstance(outcome, InvalidRequest):
                raise outcome
        found = [outcome for outcome in outcomes if not isinstance(outcome, InvalidRequest)]
        facts = {(part.message, part.index): fact for part, (fact, _) in zip(parts, found, strict=True)}
        return RequestFacts(facts, tuple(record for _, record in found))

    async def _branch(self, part: FoundPart, deadline: float) -> tuple[Fact | None, PartRecord] | InvalidRequest:
        """Never raises but when it is cancelled: one branch does not end the others."""
        key = (part.modality, part.sha256)
        started = self._clock.monotonic()
        branch = self._branches[part.modality]
        status: PartStatus = "ok"
        fact = self._remembered.get(key)
        cached = fact is not None
        if fact is None:
            self.running += 1
            try:
                job = DecodeSound(part.data) if part.modality == "audio" else DecodePicture(part.data)
                fact = await branch.run(job, min(deadline, started + branch.timeout_s))
                self._remember(key, fact)
            except Refusal as refusal:
                return InvalidRequest(f"`{part.path}`: {refusal}.", param=part.path)
            except WorkerTimeout:
                status = "timeout"
            except WorkerFailed as failure:
                log.warning("a part could not be read: %s (%s, sha256 %s)", failure, part.modality, part.sha256[:16])
                status = "failed"
            finally:
                self.running -= 1
        return fact, PartRecord(
            part=part.path,
            modality=part.modality,
            sha256=part.sha256,
            size_bytes=len(part.data),
            status=status,
            cached=cached,
            duration_ms=round((self._clock.monotonic() - started) * 1000.0, 3),
            confidence=None if fact is None else fact.confidence,
        )

    async def hear(self, request: TranscriptionRequest, deadline: float) -> tuple[Sound, Found]:
        """Return a sound and what is said in it.

        Args:
            deadline: monotonic seconds; the branch also has its own.

        Raises:
            Refusal: the sound is invalid.
            WorkerFailed: it was not read in time, or its child died.
        """
        branch = self._branches["audio"]
        self.running += 1
        try:
            return await branch.hear(request, min(deadline, self._clock.monotonic() + branch.timeout_s))
        finally:
            self.running -= 1

    def _remember(self, key: tuple[Modality, str], fact: Fact) -> None:
        self._remembered[key] = fact
        if len(self._remembered) > self._config.remembered:
            self._remembered.popitem(last=False)

    async def close(self) -> None:
        """End all children."""
        for branch in self._branches.values():
            await branch.close()
