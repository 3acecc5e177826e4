"""The parts of a generation, as text or as soft tokens: when the encoder graph runs for it, and on what.

A branch runs before the Decision only if a signal needs its facts (`estimate`), else with the first attempt whose
target cannot take its parts (`prepare`); never twice for one request. Where the attempt's plan says so, a picture
becomes soft tokens instead, by the projector of the target's model (`projectors`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec

from models.catalog.projector import Projector
from models.llama_cpp.protocol import SoftTokens
from models.modalities.graph.branch import LocalBranch, PartMemory
from models.modalities.graph.facts import RequestFacts, facts_of, soft_tokens_of
from models.modalities.graph.graph import EncoderGraph, invalid_part
from models.modalities.graph.speech_detection import SpeechDetection
from models.modalities.installed import DECODER
from models.modalities.process.messages import PartLimits, Refusal, WorkerSpec
from models.modalities.process.parent import WorkerFailed, WorkerProcess
from router.jobs.revisions import LateTerms
from router.parts.fusion import fuse
from router.parts.reading import find_parts, has_parts
from router.policy.signals import AUDIO_S, AUDIO_SPEECH, IMAGE_PIXELS, LANGUAGE, PICTURES_TEXT
from router.serving.gauges import Gauge
from router.types import AttemptPlan, Modality, PartRecord, Request, Transcripts

from ..clock import Clock
from ..config.schema import ModalitiesConfig
from .projectors import Projectors

if TYPE_CHECKING:
    from .generation import Generation

log = logging.getLogger(__name__)

_N = TypeVar("_N", int, float)


class PartEncoders:
    """The encoders of this box.

    Args:
        encoders: what to run, by kind of part.
        transcripts: the form in which a model reads transcripts.
        find_projector: of a model on the device. Raises ArtifactError.
        detector: detects speech in live sessions; None: this box cannot.
    """

    def __init__(
        self,
        encoders: Mapping[Modality, WorkerSpec],
        config: ModalitiesConfig,
        clock: Clock,
        transcripts: Callable[[str], Transcripts] = lambda _: "written",
        find_projector: Callable[[str], Projector | None] = lambda _: None,
        detector: WorkerSpec | None = None,
    ) -> None:
        limits = PartLimits(config.max_audio_s, config.max_pixels, config.max_text_bytes)
        self._branches: dict[Modality, LocalBranch] = {}
        for kind, spec in encoders.items():
            timeout_s = config.audio_timeout_s if kind == "audio" else config.image_timeout_s
            self._branches[kind] = LocalBranch(spec, limits, config.decoder_memory_bytes, timeout_s, config.language)
        self._decoder = WorkerProcess(WorkerSpec(DECODER, limits, memory_bytes=config.decoder_memory_bytes))
        images = self._branches.get("image")
        self.projectors = Projectors(
            find_projector,
            self._decoder if images is None else images.decoder,
            config.remembered,
            config.image_timeout_s,
        )
        self.graph = EncoderGraph(
            self._branches,
            PartMemory(config.remembered),
            max_parts=config.max_parts,
            clock=clock.monotonic,
            projectors=self.projectors,
        )
        self.kinds = self.graph.kinds
        self.detector = None if detector is None else SpeechDetection(detector)
        self._config = config
        self._clock = clock
        self._transcripts = transcripts

    def concerns(self, request: Request) -> bool:
        """Whether the request has a part that an encoder of this box reads."""
        return self.graph.concerns(request)

    async def fuse(self, generation: Generation, kinds: Sequence[Modality], model: str) -> Request:
        """Return the generation's request with its parts of these kinds as text for `model`; its branches run once.

        Raises:
            InvalidRequest: a part is invalid, or a request that is one sound has no speech.
            EncoderFailed: nothing is left of the request's last message.
        """
        found = await self._ask(generation, kinds)
        return fuse(generation.request, found.facts, kinds, self._transcripts(model))

    async def prepare(self, generation: Generation, plan: AttemptPlan) -> tuple[Request, tuple[SoftTokens, ...]]:
        """Return the request as the plan's target reads it: parts as text, or as soft tokens, which come with it.

        Branches that ran for an earlier attempt are not run again. Those that `plan.wait_for` does not wait for are
        cancelled, and skipped. Under `hybrid` a part whose soft tokens cannot be had is read as text after all. If a
        fleet's bundle replaced the model while its parts were read, they are read again: its weights are others now.

        Raises:
            As `fuse`.
        """
        request, model = generation.request, plan.target.model
        known = generation.facts or RequestFacts()
        kinds = tuple(kind for kind in plan.facts if kind not in known.kinds)
        made_by, soft = self.projectors.digest(model), generation.soft
        has_soft = not plan.soft or (soft is not None and (soft.model, soft.projector) == (model, made_by))
        if kinds or not has_soft:
            projected = () if has_soft else plan.soft
            read = await self.graph.read(
                request, kinds, generation.deadline, plan.wait_for, model, projected, _late(generation)
            )
            if kinds:
                generation.facts = known.joined(facts_of(kinds, read))
            if projected:
                generation.soft = soft_tokens_of(model, made_by, read)
                if made_by != self.projectors.digest(model):
                    return await self.prepare(generation, plan)
        soft = generation.soft if plan.soft else None
        markers = {} if soft is None else soft.markers
        as_text = plan.facts
        if plan.fusion == "hybrid" and not all(markers.values()):
            instead = tuple(kind for kind in plan.soft if kind in self.kinds)
            await self._ask(generation, instead)
            as_text = (*plan.facts, *instead)
            markers = {place: marker for place, marker in markers.items() if marker or not instead}
        facts = {} if generation.facts is None else generation.facts.facts
        fused = fuse(request, facts, as_text, self._transcripts(model), markers)
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
            found = await self.graph.facts(generation.request, generation.deadline, missing, _late(generation))
            known = known.joined(found)
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
                raise invalid_part(part, refusal) from None
            except WorkerFailed as failure:
                log.warning("a part could not be measured: %s (%s, sha256 %s)", failure, kind, part.sha256[:16])
                return None
        return measured

    async def read_late(self, request: Request, by: float, kinds: Sequence[Modality]) -> tuple[PartRecord, ...]:
        """Read the parts of these kinds that were late, until `by`, monotonic s: the next request finds them known.

        Raises:
            InvalidRequest: a part is invalid.
        """
        return (await self.graph.late_facts(request, by, kinds)).records

    def gauges(self) -> Iterator[Gauge]:
        """Yield the gauges of `/metrics`."""
        yield Gauge(
            "causeway_edge_parts_in_progress", "Parts of requests that encoders are reading.", self.graph.running
        )
        pools: list[tuple[str, LocalBranch | Projectors]] = [*self._branches.items(), ("projector", self.projectors)]
        for name, pool in pools:
            labels = (("part", name),)
            yield Gauge("causeway_edge_encoder_processes", _PROCESSES, pool.running, labels)
            yield Gauge("causeway_edge_encoder_process_starts", _STARTS, pool.starts, labels, is_counter=True)

    async def close(self) -> None:
        """End all children."""
        await self.graph.close()
        for branch in self._branches.values():
            await branch.close()
        await self.projectors.close()
        if self.detector is not None:
            await self.detector.close()
        await self._decoder.close()


_PROCESSES = "Decoders and encoders that are started, by kind of part (audio, image, file), and projectors."
_STARTS = "Decoders, encoders and projectors started so far, by kind of part; each that died or hung adds one."


def _late(generation: Generation) -> LateTerms | None:
    """How long late parts may be read; None: not at all, as for all requests but jobs."""
    return None if generation.job is None else generation.job.late
