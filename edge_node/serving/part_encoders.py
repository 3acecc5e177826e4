"""The parts of a generation, as text or as soft tokens: runs the encoder graph on them when they are needed.

A branch runs before the Decision only if a signal needs its facts (`estimate`), else with the first attempt whose
target cannot take its parts (`prepare`); never twice for one request. If the attempt's plan requires it, an image
becomes soft tokens instead, by the projector that the manifest of the target's model names (`Projectors`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec

from causeway_server.models.catalog.artifact import ArtifactError, ArtifactNotFound
from causeway_server.models.catalog.projector import Projector, has_pillow
from causeway_server.models.llama_cpp.protocol import SoftTokens
from causeway_server.models.parts.graph.branch import LocalBranch, PartMemory, SpeechDetection
from causeway_server.models.parts.graph.graph import EncoderGraph, RequestFacts, facts_of, invalid_part, soft_tokens_of
from causeway_server.models.parts.installed import DECODER
from causeway_server.models.parts.process.messages import (
    Decode,
    ImagePixels,
    PartLimits,
    Projected,
    ProjectImage,
    Refusal,
    WorkerSpec,
)
from causeway_server.models.parts.process.parent import WorkerFailed, WorkerProcess
from causeway_server.router.bundle.settings import PartsConfig
from causeway_server.router.parts.reading import Form, find_parts, fuse, has_parts
from causeway_server.router.policy.signals import AUDIO_S, AUDIO_SPEECH, IMAGE_PIXELS, IMAGES_TEXT, LANGUAGE
from causeway_server.router.serving.metrics import Sample
from causeway_server.router.types import AttemptPlan, Modality, Request, Transcripts

from ..clock import Clock

if TYPE_CHECKING:
    from .generation import Generation

log = logging.getLogger(__name__)

_N = TypeVar("_N", int, float)
VISION_WORKER = "causeway_server.models.parts.encoders.mmproj:VisionModel"


class PartEncoders:
    """The encoders of this device. `transcripts` returns the form in which a model reads transcripts; `find_projector`
    the projector of a device's model, or raises ArtifactError; `detector` detects speech in live sessions, if there is
    one.
    """

    def __init__(
        self,
        encoders: Mapping[Modality, WorkerSpec],
        config: PartsConfig,
        clock: Clock,
        transcripts: Callable[[str], Transcripts] = lambda _: "written",
        find_projector: Callable[[str], Projector | None] = lambda _: None,
        detector: WorkerSpec | None = None,
    ) -> None:
        limits = PartLimits(config.max_audio_s, config.max_pixels, config.max_text_bytes)
        self._branches: dict[Modality, LocalBranch] = {}
        for kind, spec in encoders.items():
            timeout_s = config.audio_timeout_s if kind == "audio" else config.image_timeout_s
            self._branches[kind] = LocalBranch(
                kind, spec, limits, config.decoder_memory_bytes, timeout_s, config.language
            )
        self._decoder = WorkerProcess(WorkerSpec(DECODER, limits, memory_bytes=config.decoder_memory_bytes))
        images = self._branches.get("image")
        self.projectors = Projectors(
            find_projector,
            self._decoder if images is None else images.decoder,
            config.fact_cache_entries,
            config.image_timeout_s,
        )
        self._memory = PartMemory(config.fact_cache_entries)
        self.graph = EncoderGraph(
            self._branches, self._memory, max_parts=config.max_parts, clock=clock.monotonic, projectors=self.projectors
        )
        self.kinds = self.graph.kinds
        self.detector = None if detector is None else SpeechDetection(detector)
        self._config = config
        self._clock = clock
        self.transcripts = transcripts

    def forget(self) -> None:
        """Forget what was read of all parts."""
        self._memory.clear()
        self.projectors.forget()

    def concerns(self, request: Request) -> bool:
        """Return whether the request has a part that an encoder of this device reads."""
        return self.graph.concerns(request)

    async def fuse(self, generation: Generation, kinds: Sequence[Modality], form: Form) -> Request:
        """Return the generation's request with its parts of these kinds as text, transcripts in this form; its branches
        run once. Raises InvalidRequest if a part is invalid, or a clip alone has no speech; EncoderFailed if the last
        message would be empty.
        """
        facts = await self._ask(generation, kinds)
        return fuse(generation.request, facts.facts, kinds, form)

    async def prepare(
        self, generation: Generation, plan: AttemptPlan, form: Form | None = None
    ) -> tuple[Request, tuple[SoftTokens, ...]]:
        """Return the request as the plan's target reads it: parts as text, or as soft tokens, which come with it.

        Branches that ran for an earlier attempt are not run again. Those outside `plan.wait_for` are cancelled, and
        skipped. Under `hybrid` a part whose soft tokens cannot be computed is read as text after all. If a fleet's
        bundle replaced the model while its parts were read, they are read again, because its weights have changed.
        `form`: that of transcripts; None: the one that the model reads. Raises as `fuse`.
        """
        request, model = generation.request, plan.target.model
        known = generation.facts or RequestFacts()
        kinds = tuple(kind for kind in plan.facts if kind not in known.kinds)
        made_by, soft = self.projectors.digest(model), generation.soft
        has_soft = not plan.soft or (soft is not None and (soft.model, soft.projector) == (model, made_by))
        if kinds or not has_soft:
            projected = () if has_soft else plan.soft
            read = await self.graph.read(request, kinds, generation.deadline, plan.wait_for, model, projected)
            if kinds:
                generation.facts = known.joined(facts_of(kinds, read))
            if projected:
                generation.soft = soft_tokens_of(model, made_by, read)
                if made_by != self.projectors.digest(model):
                    return await self.prepare(generation, plan, form)
        soft = generation.soft if plan.soft else None
        markers = {} if soft is None else soft.markers
        as_text = plan.facts
        if plan.fusion == "hybrid" and not all(markers.values()):
            instead = tuple(kind for kind in plan.soft if kind in self.kinds)
            await self._ask(generation, instead)
            as_text = (*plan.facts, *instead)
            markers = {place: marker for place, marker in markers.items() if marker or not instead}
        facts = {} if generation.facts is None else generation.facts.facts
        fused = fuse(request, facts, as_text, form or self.transcripts(model), markers)
        return fused, () if soft is None else soft.distinct

    async def estimate(self, generation: Generation, signals: frozenset[str]) -> None:
        """Compute `signals` that are about parts; one that cannot be computed is absent. Raises InvalidRequest."""
        estimates = generation.estimates
        if "image" in self.kinds and has_parts(generation.request, ("image",)):
            if IMAGE_PIXELS in signals and estimates.image_pixels is None:
                sizes = await self._measured(generation, "image", self._branches["image"].pixels)
                estimates = msgspec.structs.replace(estimates, image_pixels=None if sizes is None else sum(sizes))
            if IMAGES_TEXT in signals and estimates.images_text is None:
                facts = await self._ask(generation, ("image",))
                estimates = msgspec.structs.replace(estimates, images_text=facts.says("image"))
            generation.estimates = estimates  # also known if an audio part is invalid
        if "audio" in self.kinds and has_parts(generation.request, ("audio",)):
            if AUDIO_S in signals and estimates.audio_s is None:
                lengths = await self._measured(generation, "audio", self._branches["audio"].seconds)
                seconds = None if lengths is None else round(sum(lengths), 3)
                estimates = msgspec.structs.replace(estimates, audio_s=seconds)
            if not signals.isdisjoint((LANGUAGE, AUDIO_SPEECH)) and estimates.audio_speech is None:
                facts = await self._ask(generation, ("audio",))
                speech, language = facts.says("audio"), facts.language
                estimates = msgspec.structs.replace(estimates, audio_speech=speech, language=language)
        generation.estimates = estimates

    async def _ask(self, generation: Generation, kinds: Sequence[Modality]) -> RequestFacts:
        """Return the generation's facts about these kinds and those requested earlier. Raises InvalidRequest."""
        known = generation.facts or RequestFacts()
        if missing := [kind for kind in kinds if kind not in known.kinds]:
            facts = await self.graph.facts(generation.request, generation.deadline, missing)
            known = known.joined(facts)
            generation.facts = known
        return known

    async def _measured(
        self, generation: Generation, kind: Modality, measure: Callable[[bytes, float], Awaitable[_N]]
    ) -> list[_N] | None:
        """Measure each part: an image's declared pixels, an audio clip's seconds; None if one is not known in time.
        InvalidRequest names an invalid part.
        """
        deadline = min(generation.deadline, self._clock.monotonic() + self._branches[kind].timeout_s)
        measured: list[_N] = []
        for part in find_parts(generation.request, (kind,), self._config.max_parts):
            try:
                measured.append(await measure(part.data, deadline))
            except Refusal as refusal:
                raise invalid_part(part, refusal) from None
            except WorkerFailed as failure:
                log.warning(
                    "The size of a part could not be measured: %s (%s, sha256 %s).", failure, kind, part.sha256[:16]
                )
                return None
        return measured

    def samples(self) -> Iterator[Sample]:
        """Yield the samples of `/metrics`."""
        yield Sample("causeway_edge_parts_in_progress", self.graph.running)
        pools: list[tuple[str, LocalBranch | Projectors]] = [*self._branches.items(), ("projector", self.projectors)]
        for name, pool in pools:
            labels = (("part", name),)
            yield Sample("causeway_edge_encoder_processes", pool.running, labels)
            yield Sample("causeway_edge_encoder_process_starts", pool.starts, labels, kind="counter")

    async def close(self) -> None:
        """End all children."""
        for branch in self._branches.values():
            await branch.close()
        await self.projectors.close()
        if self.detector is not None:
            await self.detector.close()
        await self._decoder.close()


class Projectors:
    """The projectors of the models that the active policy names. Each has a child, which starts with the first image
    for its model. The soft tokens of at most `remembered` images are cached. `find` may raise ArtifactError.
    """

    def __init__(
        self, find: Callable[[str], Projector | None], decoder: WorkerProcess, remembered: int, timeout_s: float
    ) -> None:
        self._find = find
        self._decoder = decoder
        self._limit = remembered
        self._timeout_s = timeout_s
        self._known: dict[str, Projector] = {}  # by model
        self._named: frozenset[str] | None = None  # models of the active policy; None: all
        self._workers: dict[str, WorkerProcess] = {}  # by the projector's digest
        self._reading: Counter[str] = Counter()  # number of images that a worker is reading, or that wait for it
        self._remembered: OrderedDict[tuple[str, str], SoftTokens] = OrderedDict()
        self._former_starts = 0  # starts of workers that have been dropped

    def forget(self) -> None:
        """Forget the soft tokens of all images."""
        self._remembered.clear()

    @property
    def starts(self) -> int:
        """Number of children started so far."""
        return self._former_starts + sum(worker.starts for worker in self._workers.values())

    @property
    def running(self) -> int:
        """Number of children; a killed one counts until the next image needs it."""
        return sum(worker.pid is not None for worker in self._workers.values())

    def kinds(self, model: str) -> tuple[Modality, ...]:
        """Read the model's manifest again; return the kinds of parts that it takes as soft tokens."""
        self._known.pop(model, None)
        try:
            projector = self._find(model)
        except ArtifactError as error:
            if not isinstance(error, ArtifactNotFound):
                log.error("The model %s does not take images as soft tokens: %s", model, error)
            return ()
        if projector is None or not has_pillow():
            return ()
        self._known[model] = projector
        return ("image",)

    def use(self, models: Collection[str]) -> None:
        """End the children that no model of the active policy needs; one that is reading an image ends after it."""
        self._named = frozenset(models)
        self._end_unused()

    def digest(self, model: str) -> str:
        """Return an identifier of the version of a model's projector; "" if it has none."""
        projector = self._known.get(model)
        return "" if projector is None else projector.digest

    def remembered(self, model: str, sha256: str) -> SoftTokens | None:
        """Return the cached soft tokens of an equal image, if there are any."""
        projector = self._known.get(model)
        return None if projector is None else self._remembered.get((projector.digest, sha256))

    async def run(self, model: str, image: bytes, sha256: str, deadline: float) -> SoftTokens:
        """Return the soft tokens of an image until `deadline` (the loop's time), or its own timeout. Raises Refusal if
        the image is invalid; WorkerTimeout, WorkerFailed if it was not read.
        """
        projector = self._known.get(model)
        if projector is None:
            raise WorkerFailed(f"{model} no longer has a projector.")
        deadline = min(deadline, asyncio.get_running_loop().time() + self._timeout_s)
        decoded = await self._decoder.run(Decode("image", image), deadline)
        assert isinstance(decoded, ImagePixels)
        self._reading[projector.digest] += 1
        try:
            projected = await self._worker_of(projector).run(ProjectImage(decoded), deadline)
        finally:
            self._reading[projector.digest] -= 1
            self._end_unused()
        assert isinstance(projected, Projected)
        soft = self._remembered[projector.digest, sha256] = SoftTokens(projected.vectors, projected.runs)
        if len(self._remembered) > self._limit:
            self._remembered.popitem(last=False)
        return soft

    async def close(self) -> None:
        """End all children; the decoder belongs to its owner."""
        for worker in self._workers.values():
            await worker.close()

    def _worker_of(self, projector: Projector) -> WorkerProcess:
        worker = self._workers.get(projector.digest)
        if worker is None:
            options = {"mmproj": str(projector.path), "model": str(projector.model)}
            spec = WorkerSpec(VISION_WORKER, options=options, memory_bytes=2 * projector.memory_bytes)
            worker = self._workers[projector.digest] = WorkerProcess(spec)
        return worker

    def _end_unused(self) -> None:
        """End the children of projectors that were replaced, or whose model the policy does not name."""
        named = self._known if self._named is None else self._known.keys() & self._named
        used = {self._known[model].digest for model in named}
        for digest in [one for one in self._workers if one not in used and not self._reading[one]]:
            worker = self._workers.pop(digest)
            self._former_starts += worker.starts
            worker.end()
            del self._reading[digest]
