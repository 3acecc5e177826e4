"""The encoder graph of a request: a branch per kind of part, decoder then encoder, all branches at the same time.

    part ── decoder child ── encoder child ── fact       each branch has its own deadline
                                                          cancelled with the request

A part that is invalid is the client's error. A branch that is late or whose child dies leaves its fact out: the request
goes on with what is there, and says so (`x-causeway-modalities`, and the decision record). Facts are remembered by the
hash of the part, in memory only. A part's bytes are nowhere but in the request.

A branch runs before the Decision only if a signal needs its facts (`estimate`), else with the first attempt whose
target cannot take its parts (`fuse`); never twice for one request.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec

from models.modalities.process.messages import (
    DecodePicture,
    DecodeSound,
    DecodeText,
    Found,
    MeasurePicture,
    PartLimits,
    Picture,
    PictureSize,
    Refusal,
    Sound,
    Transcribe,
    WorkerSpec,
)
from models.modalities.process.parent import Tell, WorkerFailed, WorkerProcess, WorkerTimeout
from router.errors import InvalidRequest
from router.openai.audio import TranscriptionRequest
from router.parts.fusion import fuse
from router.parts.reading import FoundPart, find_parts, has_parts
from router.policy.signals import AUDIO_S, AUDIO_SPEECH, IMAGE_PIXELS, LANGUAGE, PICTURES_TEXT
from router.types import Fact, Modality, PartRecord, PartStatus, Request, Transcripts, WaitFor

from ..clock import Clock
from ..config.schema import ModalitiesConfig
from .boxed import DECODER
from .facts import RequestFacts

if TYPE_CHECKING:
    from ..serving.generation import Generation

log = logging.getLogger(__name__)

_JOBS: Mapping[Modality, Callable[[bytes], DecodeSound | DecodePicture | DecodeText]] = {
    "audio": DecodeSound,
    "image": DecodePicture,
    "file": DecodeText,
}
_N = TypeVar("_N", int, float)
_Outcome = tuple[Fact | None, PartRecord] | InvalidRequest


class _ReadPart(msgspec.Struct, frozen=True):
    """What is known of a part. `seconds`: of a sound."""

    found: Found
    seconds: float = 0.0


class _Branch:
    """Decoder and encoder of one kind of part, each a child that starts with the first part."""

    def __init__(
        self, encoder: WorkerSpec, limits: PartLimits, memory_bytes: int, timeout_s: float, language: str
    ) -> None:
        self._language = language
        self.decoder = WorkerProcess(WorkerSpec(DECODER, limits, memory_bytes=memory_bytes))
        self.encoder = WorkerProcess(encoder)
        self.timeout_s = timeout_s

    async def run(
        self,
        job: DecodeSound | DecodePicture | DecodeText,
        deadline: float,
        language: str = "",
        prompt: str = "",
        temperature: float = 0.0,
        tell: Tell | None = None,
    ) -> _ReadPart:
        """Raises Refusal, WorkerTimeout or WorkerFailed."""
        decoded = await self.decoder.run(job, deadline)
        if isinstance(decoded, Found):  # text: nothing is left to encode
            return _ReadPart(decoded)
        assert isinstance(decoded, Sound | Picture)
        if isinstance(decoded, Picture):
            found, seconds = await self.encoder.run(decoded, deadline), 0.0
        else:
            transcribe = Transcribe(decoded, language or self._language, prompt, temperature, tell is not None)
            found = await self.encoder.run(transcribe, deadline, tell)
            seconds = decoded.seconds
        assert isinstance(found, Found)
        return _ReadPart(found, seconds)

    async def pixels(self, picture: bytes, deadline: float) -> int:
        """Width × height as the file declares them. Raises as `run`."""
        size = await self.decoder.run(MeasurePicture(picture), deadline)
        assert isinstance(size, PictureSize)
        return size.width * size.height

    async def seconds(self, sound: bytes, deadline: float) -> float:
        """Length of the sound, decoded. Raises as `run`."""
        decoded = await self.decoder.run(DecodeSound(sound), deadline)
        assert isinstance(decoded, Sound)
        return decoded.seconds

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
        limits = PartLimits(config.max_audio_s, config.max_pixels, config.max_text_bytes)
        self.kinds: tuple[Modality, ...] = tuple(sorted(encoders))
        self._branches: dict[Modality, _Branch] = {}
        for kind, spec in encoders.items():
            timeout_s = config.audio_timeout_s if kind == "audio" else config.image_timeout_s
            self._branches[kind] = _Branch(spec, limits, config.decoder_memory_bytes, timeout_s, config.language)
        self._config = config
        self._clock = clock
        self._transcripts = transcripts
        self._remembered: OrderedDict[tuple[Modality, str], _ReadPart] = OrderedDict()
        self.running = 0  # branches in progress

    def concerns(self, request: Request) -> bool:
        """Whether the request has a part that an encoder of this box reads."""
        return request.kind == "chat" and has_parts(request, self.kinds)

    async def fuse(
        self, generation: Generation, kinds: Sequence[Modality], model: str, wait_for: WaitFor = "all"
    ) -> Request:
        """Return the generation's request with its parts of these kinds as text for `model`; its branches run once.

        Args:
            wait_for: first: branches that are not ready when the first one is are cancelled, and skipped.

        Raises:
            InvalidRequest: a part is invalid, or nobody speaks in a request that is one sound.
            EncoderFailed: nothing is left of the request's last message.
        """
        found = await self._ask(generation, kinds, wait_for)
        return fuse(generation.request, found.facts, kinds, self._transcripts(model))

    async def estimate(self, generation: Generation, signals: frozenset[str]) -> None:
        """Compute those of `signals` that are about parts. One that cannot be computed stays absent.

        Raises:
            InvalidRequest: a part is invalid.
        """
        if "image" in self.kinds and has_parts(generation.request, ("image",)):
            await self._estimate_pictures(generation, signals)
        if "audio" in self.kinds and has_parts(generation.request, ("audio",)):
            await self._estimate_sounds(generation, signals)

    async def _estimate_pictures(self, generation: Generation, signals: frozenset[str]) -> None:
        estimates = generation.estimates
        if IMAGE_PIXELS in signals and estimates.image_pixels is None:
            pixels = await self.pixels(generation.request, generation.deadline)
            estimates = msgspec.structs.replace(estimates, image_pixels=pixels)
        if PICTURES_TEXT in signals and estimates.pictures_text is None:
            found = await self._ask(generation, ("image",))
            estimates = msgspec.structs.replace(estimates, pictures_text=found.says("image"))
        generation.estimates = estimates

    async def _estimate_sounds(self, generation: Generation, signals: frozenset[str]) -> None:
        estimates = generation.estimates
        if AUDIO_S in signals and estimates.audio_s is None:
            seconds = await self.seconds(generation.request, generation.deadline)
            estimates = msgspec.structs.replace(estimates, audio_s=seconds)
        if not signals.isdisjoint((LANGUAGE, AUDIO_SPEECH)) and estimates.audio_speech is None:
            found = await self._ask(generation, ("audio",))
            estimates = msgspec.structs.replace(estimates, audio_speech=found.says("audio"), language=found.language)
        generation.estimates = estimates

    async def _ask(self, generation: Generation, kinds: Sequence[Modality], wait_for: WaitFor = "all") -> RequestFacts:
        """The generation's facts about these kinds and those asked for earlier. Raises InvalidRequest."""
        known = generation.facts or RequestFacts()
        if missing := [kind for kind in kinds if kind not in known.kinds]:
            known = known.joined(await self.facts(generation.request, generation.deadline, missing, wait_for))
            generation.facts = known
        return known

    async def pixels(self, request: Request, deadline: float) -> int | None:
        """Return the declared size of the request's pictures together; None if that is not known in time.

        Raises:
            InvalidRequest: a picture is invalid; the message names it.
        """
        sizes = await self._measured(request, "image", self._branches["image"].pixels, deadline)
        return None if sizes is None else sum(sizes)

    async def seconds(self, request: Request, deadline: float) -> float | None:
        """Return the length of the request's sounds together; None if that is not known in time.

        Raises:
            InvalidRequest: a sound is invalid; the message names it.
        """
        lengths = await self._measured(request, "audio", self._branches["audio"].seconds, deadline)
        return None if lengths is None else round(sum(lengths), 3)

    async def _measured(
        self, request: Request, kind: Modality, measure: Callable[[bytes, float], Awaitable[_N]], deadline: float
    ) -> list[_N] | None:
        """Measure each part of this kind; None if one cannot be in time. Raises InvalidRequest."""
        deadline = min(deadline, self._clock.monotonic() + self._branches[kind].timeout_s)
        measured: list[_N] = []
        for part in find_parts(request, (kind,), self._config.max_parts):
            try:
                measured.append(await measure(part.data, deadline))
            except Refusal as refusal:
                raise _invalid(part, refusal) from None
            except WorkerFailed as failure:
                log.warning("a part could not be measured: %s (%s, sha256 %s)", failure, kind, part.sha256[:16])
                return None
        return measured

    async def facts(
        self,
        request: Request,
        deadline: float,
        kinds: Sequence[Modality] | None = None,
        wait_for: WaitFor = "all",
    ) -> RequestFacts:
        """Run the branches of these kinds and return what they found in time.

        Args:
            deadline: monotonic seconds; each branch also has its own.
            kinds: None: all that this box reads.
            wait_for: first: cancel the branches that are not ready when the first one is.

        Raises:
            InvalidRequest: a part is invalid; the message names it.
        """
        kinds = self.kinds if kinds is None else kinds
        parts = find_parts(request, kinds, self._config.max_parts)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._branch(part, deadline)) for part in parts]
            if wait_for == "first":
                await _first_ready(parts, running)
        pairs = zip(parts, running, strict=True)
        outcomes = [_skipped(part) if task.cancelled() else task.result() for part, task in pairs]
        for outcome in outcomes:
            if isinstance(outcome, InvalidRequest):
                raise outcome
        found = [outcome for outcome in outcomes if not isinstance(outcome, InvalidRequest)]
        facts = {(part.message, part.index): fact for part, (fact, _) in zip(parts, found, strict=True)}
        return RequestFacts(tuple(kinds), facts, tuple(record for _, record in found))

    async def _branch(self, part: FoundPart, deadline: float) -> _Outcome:
        """Never raises but when it is cancelled: one branch does not end the others."""
        key = (part.reader, part.sha256)
        started = self._clock.monotonic()
        branch = self._branches.get(part.reader)
        if branch is None:
            return _invalid(part, "it is a picture, and this box has no encoder for pictures. Send its text")
        status: PartStatus = "ok"
        read = self._remembered.get(key)
        cached = read is not None
        if read is None:
            self.running += 1
            try:
                read = await branch.run(_JOBS[part.reader](part.data), min(deadline, started + branch.timeout_s))
                if part.reader != "file":  # whose text may be long, and costs nothing
                    self._remember(key, read)
            except Refusal as refusal:
                return _invalid(part, refusal)
            except WorkerTimeout:
                status = "timeout"
            except WorkerFailed as failure:
                log.warning("a part could not be read: %s (%s, sha256 %s)", failure, part.modality, part.sha256[:16])
                status = "failed"
            finally:
                self.running -= 1
        fact = None if read is None else read.found.fact
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

    async def hear(
        self, request: TranscriptionRequest, deadline: float, tell: Tell | None = None
    ) -> tuple[Found, float, bool]:
        """Return what is said in a sound, its length in seconds, and whether that was known already.

        Args:
            deadline: monotonic seconds; the branch also has its own.
            tell: gets each segment as soon as it is understood; may not raise.

        Raises:
            Refusal: the sound is invalid.
            WorkerFailed: it was not read in time, or its child died.
        """
        branch = self._branches["audio"]
        plain = not (request.language or request.prompt or request.temperature)
        key: tuple[Modality, str] = ("audio", hashlib.sha256(request.data).hexdigest())
        if plain and (known := self._remembered.get(key)) is not None:
            return known.found, known.seconds, True
        deadline = min(deadline, self._clock.monotonic() + branch.timeout_s)
        self.running += 1
        try:
            read = await branch.run(
                DecodeSound(request.data), deadline, request.language, request.prompt, request.temperature, tell
            )
        finally:
            self.running -= 1
        if plain:
            self._remember(key, read)
        return read.found, read.seconds, False

    def _remember(self, key: tuple[Modality, str], read: _ReadPart) -> None:
        self._remembered[key] = read
        if len(self._remembered) > self._config.remembered:
            self._remembered.popitem(last=False)

    async def close(self) -> None:
        """End all children."""
        for branch in self._branches.values():
            await branch.close()


def _invalid(part: FoundPart, refusal: Refusal | str) -> InvalidRequest:
    return InvalidRequest(f"`{part.path}`: {refusal}.", param=part.path)


async def _first_ready(parts: Sequence[FoundPart], running: Sequence[asyncio.Task[_Outcome]]) -> None:
    """Return when a branch has read all of its parts, and one of them with success; cancel the other branches."""
    pending = set(running)
    while pending:
        _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        outcomes: dict[Modality, list[_Outcome | None]] = {}
        for part, task in zip(parts, running, strict=True):
            outcomes.setdefault(part.modality, []).append(task.result() if task.done() else None)
        if any(None not in ended and any(_is_useful(one) for one in ended) for ended in outcomes.values()):
            break
    for task in pending:
        task.cancel()


def _is_useful(outcome: _Outcome | None) -> bool:
    """Whether a part was read, or is the client's error."""
    return isinstance(outcome, InvalidRequest) or (outcome is not None and outcome[0] is not None)


def _skipped(part: FoundPart) -> _Outcome:
    return None, PartRecord(part.path, part.modality, part.sha256, len(part.data), "skipped")
