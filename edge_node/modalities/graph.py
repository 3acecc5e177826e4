"""The encoder graph of a request: a branch per kind of part, decoder then encoder, all branches at the same time.

    part ── decoder child ── encoder child ── fact       each branch has its own deadline
                                                          cancelled with the request

A part that is invalid is the client's error. A branch that is late or whose child dies leaves its fact out: the request
goes on with what is there, and says so (`x-causeway-modalities`, and the decision record). Facts are remembered by the
hash of the part, in memory only. A part's bytes are nowhere but in the request.

A branch runs before the Decision only if a signal needs its facts (`estimate`), else with the first attempt whose
target cannot take its parts (`prepare`); never twice for one request. Where the attempt's plan says so, a picture
becomes soft tokens instead, by the projector of the target's model (`projectors`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec

from models.catalog.projector import Projector
from models.llama_cpp.protocol import SoftTokens
from models.modalities.process.messages import (
    DecodeSound,
    Found,
    PartLimits,
    Refusal,
    WorkerSpec,
)
from models.modalities.process.parent import Tell, WorkerFailed, WorkerProcess, WorkerTimeout
from router.errors import InvalidRequest
from router.openai.audio import TranscriptionRequest
from router.parts.fusion import fuse
from router.parts.reading import FoundPart, find_parts, has_parts
from router.policy.signals import AUDIO_S, AUDIO_SPEECH, IMAGE_PIXELS, LANGUAGE, PICTURES_TEXT
from router.types import AttemptPlan, Fact, Modality, PartRecord, PartStatus, Request, Transcripts, WaitFor

from ..clock import Clock
from ..config.schema import ModalitiesConfig
from .boxed import DECODER
from .branch import DECODER_JOBS, Branch, ReadPart
from .facts import PartReading, RequestFacts, facts_of, soft_tokens_of
from .projectors import Projectors

if TYPE_CHECKING:
    from ..serving.generation import Generation

log = logging.getLogger(__name__)

_N = TypeVar("_N", int, float)
_Outcome = PartReading | InvalidRequest


class EncoderGraph:
    """The encoders of this box.

    Args:
        encoders: what to run, by kind of part.
        transcripts: the form in which a model reads what was said.
        find_projector: of a model on the device. Raises ArtifactError.
    """

    def __init__(
        self,
        encoders: Mapping[Modality, WorkerSpec],
        config: ModalitiesConfig,
        clock: Clock,
        transcripts: Callable[[str], Transcripts] = lambda _: "written",
        find_projector: Callable[[str], Projector | None] = lambda _: None,
    ) -> None:
        limits = PartLimits(config.max_audio_s, config.max_pixels, config.max_text_bytes)
        self.kinds: tuple[Modality, ...] = tuple(sorted(encoders))
        self._branches: dict[Modality, Branch] = {}
        for kind, spec in encoders.items():
            timeout_s = config.audio_timeout_s if kind == "audio" else config.image_timeout_s
            self._branches[kind] = Branch(spec, limits, config.decoder_memory_bytes, timeout_s, config.language)
        self._decoder = WorkerProcess(WorkerSpec(DECODER, limits, memory_bytes=config.decoder_memory_bytes))
        images = self._branches.get("image")
        self.projectors = Projectors(
            find_projector, self._decoder if images is None else images.decoder, config.remembered
        )
        self._config = config
        self._clock = clock
        self._transcripts = transcripts
        self._remembered: OrderedDict[tuple[Modality, str], ReadPart] = OrderedDict()
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
        found = await self._ask(generation, kinds)
        return fuse(generation.request, found.facts, kinds, self._transcripts(model))

    async def prepare(self, generation: Generation, plan: AttemptPlan) -> tuple[Request, tuple[SoftTokens, ...]]:
        """Return the request as the plan's target reads it: parts as text, or as soft tokens, which come with it.

        Branches that ran for an earlier attempt are not run again. Those that `plan.wait_for` does not wait for are
        cancelled, and skipped.

        Raises:
            As `fuse`.
        """
        request, model = generation.request, plan.target.model
        known = generation.facts or RequestFacts()
        kinds = tuple(kind for kind in plan.facts if kind not in known.kinds)
        has_soft = not plan.soft or (generation.soft is not None and generation.soft.model == model)
        if kinds or not has_soft:
            projected = () if has_soft else plan.soft
            parts = find_parts(request, (*kinds, *projected), self._config.max_parts)
            read = await self._read(parts, generation.deadline, plan.wait_for, model, projected)
            pairs = list(zip(parts, read, strict=True))
            if kinds:
                generation.facts = known.joined(facts_of(kinds, pairs))
            if projected:
                generation.soft = soft_tokens_of(model, pairs)
        facts = {} if generation.facts is None else generation.facts.facts
        soft = generation.soft if plan.soft else None
        markers = {} if soft is None else soft.markers
        fused = fuse(request, facts, plan.facts, self._transcripts(model), markers)
        return fused, () if soft is None else soft.distinct

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

    async def _ask(self, generation: Generation, kinds: Sequence[Modality]) -> RequestFacts:
        """The generation's facts about these kinds and those asked for earlier. Raises InvalidRequest."""
        known = generation.facts or RequestFacts()
        if missing := [kind for kind in kinds if kind not in known.kinds]:
            known = known.joined(await self.facts(generation.request, generation.deadline, missing))
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

    async def facts(self, request: Request, deadline: float, kinds: Sequence[Modality] | None = None) -> RequestFacts:
        """Run the branches of these kinds and return what they found in time.

        Args:
            deadline: monotonic seconds; each branch also has its own.
            kinds: None: all that this box reads.

        Raises:
            InvalidRequest: a part is invalid; the message names it.
        """
        kinds = self.kinds if kinds is None else kinds
        parts = find_parts(request, kinds, self._config.max_parts)
        return facts_of(kinds, list(zip(parts, await self._read(parts, deadline), strict=True)))

    async def _read(
        self,
        parts: Sequence[FoundPart],
        deadline: float,
        wait_for: WaitFor = "all",
        model: str = "",
        projected: Sequence[Modality] = (),
    ) -> list[PartReading]:
        """Run a branch for each part, those of the `projected` kinds for soft tokens of `model`.

        Raises:
            InvalidRequest: a part is invalid; the message names it.
        """
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self._branch(part, deadline, model if part.modality in projected else ""))
                for part in parts
            ]
            if wait_for == "first":
                await _first_ready(parts, running)
        pairs = zip(parts, running, strict=True)
        outcomes = [
            _skipped(part, soft=part.modality in projected) if task.cancelled() else task.result()
            for part, task in pairs
        ]
        for outcome in outcomes:
            if isinstance(outcome, InvalidRequest):
                raise outcome
        return [outcome for outcome in outcomes if not isinstance(outcome, InvalidRequest)]

    async def _branch(self, part: FoundPart, deadline: float, model: str = "") -> _Outcome:
        """Read a part, for soft tokens of `model` if it is given.

        Never raises but when it is cancelled: one branch does not end the others.
        """
        started = self._clock.monotonic()
        if not model and part.reader not in self._branches:
            return _invalid(part, "it is a picture, and this box has no encoder for pictures. Send its text")
        status: PartStatus = "ok"
        found = self._known(part, model)
        cached = found is not None
        if found is None:
            self.running += 1
            try:
                found = await self._encode(part, model, deadline)
            except Refusal as refusal:
                return _invalid(part, refusal)
            except WorkerTimeout:
                status = "timeout"
            except WorkerFailed as failure:
                log.warning("a part could not be read: %s (%s, sha256 %s)", failure, part.modality, part.sha256[:16])
                status = "failed"
            finally:
                self.running -= 1
        return found, PartRecord(
            part=part.path,
            modality=part.modality,
            sha256=part.sha256,
            size_bytes=len(part.data),
            status=status,
            cached=cached,
            soft=bool(model),
            duration_ms=round((self._clock.monotonic() - started) * 1000.0, 3),
            confidence=found.confidence if isinstance(found, Fact) else None,
        )

    def _known(self, part: FoundPart, model: str) -> Fact | SoftTokens | None:
        if model:
            return self.projectors.remembered(model, part.sha256)
        read = self._remembered.get((part.reader, part.sha256))
        return None if read is None else read.found.fact

    async def _encode(self, part: FoundPart, model: str, deadline: float) -> Fact | SoftTokens:
        """Raises Refusal, WorkerTimeout or WorkerFailed."""
        now = self._clock.monotonic()
        if model:
            by = min(deadline, now + self._config.image_timeout_s)
            return await self.projectors.run(model, part.data, part.sha256, by)
        branch = self._branches[part.reader]
        read = await branch.run(DECODER_JOBS[part.reader](part.data), min(deadline, now + branch.timeout_s))
        if part.reader != "file":  # whose text may be long, and costs nothing
            self._remember((part.reader, part.sha256), read)
        return read.found.fact

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

    def _remember(self, key: tuple[Modality, str], read: ReadPart) -> None:
        self._remembered[key] = read
        if len(self._remembered) > self._config.remembered:
            self._remembered.popitem(last=False)

    async def close(self) -> None:
        """End all children."""
        for branch in self._branches.values():
            await branch.close()
        await self.projectors.close()
        await self._decoder.close()


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


def _skipped(part: FoundPart, *, soft: bool) -> _Outcome:
    return None, PartRecord(part.path, part.modality, part.sha256, len(part.data), "skipped", soft=soft)
