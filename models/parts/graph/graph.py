"""The encoder graph of one request: one branch per part, in which a decoder and then an encoder runs; all branches run
at the same time.

    part ── decoder ── encoder ── fact       each branch has its own deadline
                                             cancelled with the request

A part that is invalid is the client's error. If a branch is late or its process dies, the request continues without its
fact, and the header `x-causeway-modalities` and the request's record say so. Facts are cached by the hash of the part,
in memory only. A part's bytes are held only by the request.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from causeway_server.router.errors import InvalidRequest, UnsupportedFeature
from causeway_server.router.openai.audio import (
    GRANULARITIES,
    Transcript,
    TranscriptionRequest,
    TranscriptSegment,
    TranscriptWord,
)
from causeway_server.router.parts.reading import FoundPart, find_parts, has_parts
from causeway_server.router.types import Fact, Modality, PartRecord, PartStatus, Request, WaitFor

from ...llama_cpp.protocol import SoftTokens
from ..process.messages import AudioTerms, Found, Refusal
from ..process.parent import Tell, WorkerFailed, WorkerTimeout
from .branch import PLAIN, Branch, Memory

PartReading = tuple[Fact | SoftTokens | None, PartRecord]
"""The result for a part; None if it is not there in time."""
_WORST: tuple[PartStatus, ...] = ("failed", "timeout", "skipped", "ok")


class RequestFacts(msgspec.Struct, frozen=True):
    """The results of the encoders for a request. A fact is None if its branch did not finish in time."""

    kinds: tuple[Modality, ...] = ()  # kinds of part that encoders were asked to read
    facts: Mapping[tuple[int, int], Fact | None] = {}  # facts by message and index of the part
    records: tuple[PartRecord, ...] = ()

    def says(self, kind: Modality) -> bool | None:
        """Return whether a part of this kind contains words; None if a part that may contain some was not read."""
        if any(fact is not None and fact.text for fact in self._of(kind)):
            return True
        return None if None in self._of(kind) else False

    @property
    def language(self) -> str | None:
        """The language of the first audio that contains speech."""
        return next((fact.language for fact in self._of("audio") if fact is not None and fact.language), None)

    def _of(self, kind: Modality) -> list[Fact | None]:
        return [fact for fact, record in zip(self.facts.values(), self.records, strict=True) if record.modality == kind]

    def joined(self, more: RequestFacts) -> RequestFacts:
        """Return these facts together with `more`, which are about other kinds of part of the same request."""
        return RequestFacts((*self.kinds, *more.kinds), {**self.facts, **more.facts}, (*self.records, *more.records))


class RequestSoftTokens(msgspec.Struct, frozen=True):
    """The soft tokens of a request's parts for one model, None if a branch was late. `projector`: its digest, or ""."""

    model: str
    projector: str
    tokens: Mapping[tuple[int, int], SoftTokens | None]  # soft tokens by message and index of the part
    records: tuple[PartRecord, ...]

    @property
    def markers(self) -> dict[tuple[int, int], str]:
        """The marker of each part in the text; "" for a part without soft tokens."""
        return {place: "" if soft is None else soft.text for place, soft in self.tokens.items()}

    @property
    def distinct(self) -> tuple[SoftTokens, ...]:
        """The distinct soft tokens of the parts; equal ones once."""
        return tuple({soft.marker: soft for soft in self.tokens.values() if soft is not None}.values())


def summary(records: Sequence[PartRecord]) -> str:
    """Return the state of each kind of part, such as `audio=ok,image=timeout`: the worst state of its parts."""
    found: dict[Modality, set[PartStatus]] = {}
    for record in records:
        found.setdefault(record.modality, set()).add(record.status)
    worst = {kind: next(status for status in _WORST if status in found[kind]) for kind in sorted(found)}
    return ",".join(f"{kind}={status}" for kind, status in worst.items())


def facts_of(kinds: Sequence[Modality], read: Sequence[tuple[FoundPart, PartReading]]) -> RequestFacts:
    """Combine the readings of parts of these kinds into facts."""
    as_text = [(part, found, record) for part, (found, record) in read if not record.soft]
    facts = {(part.message, part.index): found for part, found, _ in as_text if not isinstance(found, SoftTokens)}
    return RequestFacts(tuple(kinds), facts, tuple(record for *_, record in as_text))


def soft_tokens_of(model: str, projector: str, read: Sequence[tuple[FoundPart, PartReading]]) -> RequestSoftTokens:
    """Collect the soft tokens among the readings."""
    as_tokens = [(part, found, record) for part, (found, record) in read if record.soft]
    tokens = {(part.message, part.index): found for part, found, _ in as_tokens if not isinstance(found, Fact)}
    return RequestSoftTokens(model, projector, tokens, tuple(record for *_, record in as_tokens))


def transcript_of(found: Found, seconds: float, *, words: bool = False) -> Transcript:
    """Return a clip's transcript, its times up to its end. Raises UnsupportedFeature without the times of `words`."""
    timed = tuple(
        TranscriptWord(word.text, min(word.start_s, seconds), min(word.end_s, seconds))
        for segment in found.segments
        for word in segment.words
    )
    if words and found.fact.text and not timed:
        message = (
            f"`{GRANULARITIES}`: the speech model of this tier or device cannot give the times of "
            "words. Send `segment`."
        )
        raise UnsupportedFeature(message, param=GRANULARITIES)
    segments = tuple(
        TranscriptSegment(
            one.text,
            min(one.start_s, seconds),
            min(one.end_s, seconds),
            math.log(max(one.confidence, 1e-9)),
            one.no_speech,
        )
        for one in found.segments
    )
    return Transcript(found.fact.text, found.fact.language, seconds, segments, timed)


log = logging.getLogger(__name__)

_Outcome = PartReading | InvalidRequest


class SoftEncoder(Protocol):
    """Turns images into soft tokens of a model."""

    def remembered(self, model: str, sha256: str) -> SoftTokens | None:
        """Return the cached soft tokens of an equal image, if there are any."""
        ...

    async def run(self, model: str, image: bytes, sha256: str, deadline: float) -> SoftTokens:
        """Encode an image as soft tokens by `deadline` (event loop). Raises Refusal, WorkerTimeout, WorkerFailed."""
        ...


class EncoderGraph:
    """The encoders that a request may use. `clock`: monotonic seconds; `projectors`: for soft tokens."""

    def __init__(
        self,
        branches: Mapping[Modality, Branch],
        memory: Memory,
        *,
        max_parts: int,
        clock: Callable[[], float],
        projectors: SoftEncoder | None = None,
    ) -> None:
        self.kinds: tuple[Modality, ...] = tuple(sorted(branches))
        self.running = 0  # branches in progress
        self._branches = branches
        self._memory = memory
        self._max_parts = max_parts
        self._clock = clock
        self._projectors = projectors

    def concerns(self, request: Request) -> bool:
        return request.kind == "chat" and has_parts(request, self.kinds)

    async def facts(self, request: Request, deadline: float, kinds: Sequence[Modality] | None = None) -> RequestFacts:
        """Run the branches of these kinds (None: all that can be read) and return the facts that are ready in time.

        `deadline`: monotonic seconds; each branch also has its own. Raises InvalidRequest, which names the part.
        """
        kinds = self.kinds if kinds is None else kinds
        return facts_of(kinds, await self.read(request, kinds, deadline))

    async def read(
        self,
        request: Request,
        kinds: Sequence[Modality],
        deadline: float,
        wait_for: WaitFor = "all",
        model: str = "",
        projected: Sequence[Modality] = (),
    ) -> list[tuple[FoundPart, PartReading]]:
        """Run a branch for each part of these kinds, and of the `projected` ones for soft tokens of `model`.

        Raises InvalidRequest, which names the part.
        """
        parts = find_parts(request, (*kinds, *projected), self._max_parts)
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
        return _checked(parts, outcomes)

    async def _branch(self, part: FoundPart, deadline: float, model: str) -> _Outcome:
        """Read a part, or encode it as soft tokens of `model`. Raises only CancelledError: other branches go on."""
        started = self._clock()
        if not model and part.reader not in self._branches:
            return invalid_part(part, "the part is an image, and no encoder for images is installed. Send its text")
        status: PartStatus = "ok"
        found = self._known(part, model)
        cached = found is not None
        if found is None:
            self.running += 1
            try:
                found = await self._encode(part, model, deadline)
            except Refusal as refusal:
                if not refusal.param:
                    return invalid_part(part, refusal)
                log.error(
                    "Parts of kind %s cannot be read, because of the configured %s: %s.",
                    part.modality,
                    refusal.param,
                    refusal,
                )
                status = "failed"
            except WorkerTimeout:
                status = "timeout"
            except WorkerFailed as failure:
                log.warning("A part could not be read: %s (%s, sha256 %s).", failure, part.modality, part.sha256[:16])
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
            duration_ms=round((self._clock() - started) * 1000.0, 3),
            confidence=found.confidence if isinstance(found, Fact) else None,
        )

    def _known(self, part: FoundPart, model: str) -> Fact | SoftTokens | None:
        if model:
            return None if self._projectors is None else self._projectors.remembered(model, part.sha256)
        read = self._memory.find(part.reader, part.sha256)
        return None if read is None else read.found.fact

    async def _encode(self, part: FoundPart, model: str, deadline: float) -> Fact | SoftTokens:
        """Read or encode a part. Raises Refusal, WorkerTimeout or WorkerFailed."""
        if model:
            if self._projectors is None:
                raise WorkerFailed("no projectors are installed")
            return await self._projectors.run(model, part.data, part.sha256, deadline)
        branch = self._branches[part.reader]
        read = await branch.run(part.data, min(deadline, self._clock() + branch.timeout_s))
        if part.reader != "file":  # its text may be long, and decoding it again is cheap
            self._memory.keep(part.reader, part.sha256, read)
        return read.found.fact

    async def transcribe(
        self, request: TranscriptionRequest, deadline: float, tell: Tell | None = None, *, keep: bool = True
    ) -> tuple[Found, float, bool]:
        """Return the transcript of an audio clip, its length in seconds, and whether both were cached.

        Args:
            deadline: Monotonic seconds; the branch also has its own.
            tell: Gets each segment as soon as it is understood; may not raise.
            keep: Cache the transcript.

        Raises:
            Refusal: The audio is invalid, or the request's field `param`.
            WorkerFailed: The audio was not read in time, the child died, or the configured language is unknown.
        """
        branch = self._branches["audio"]
        terms = AudioTerms(request.language, request.prompt, request.temperature, request.words)
        sha256 = hashlib.sha256(request.data).hexdigest()
        if terms == PLAIN and (known := self._memory.find("audio", sha256)) is not None:
            return known.found, known.seconds, True
        deadline = min(deadline, self._clock() + branch.timeout_s)
        self.running += 1
        try:
            read = await branch.run(request.data, deadline, terms, tell)
        except Refusal as refusal:
            if refusal.param and not request.language:
                raise WorkerFailed(f"the configured {refusal.param} was refused: {refusal}") from None
            raise
        finally:
            self.running -= 1
        if terms == PLAIN and keep:
            self._memory.keep("audio", sha256, read)
        return read.found, read.seconds, False


def invalid_part(part: FoundPart, refusal: Refusal | str) -> InvalidRequest:
    """Return the client's error about a part."""
    return InvalidRequest(f"`{part.path}`: {refusal}.", param=part.path)


async def _first_ready(parts: Sequence[FoundPart], running: Sequence[asyncio.Task[_Outcome]]) -> None:
    """Return once a branch has read all of its parts, at least one of them successfully; cancel the other branches."""
    pending = set(running)
    while pending:
        _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        outcomes: dict[Modality, list[_Outcome | None]] = {}
        for part, task in zip(parts, running, strict=True):
            outcomes.setdefault(part.modality, []).append(task.result() if task.done() else None)
        whole = [ended for ended in outcomes.values() if None not in ended]
        # A part was read, or is the client's error.
        if any(isinstance(one, InvalidRequest) or (one and one[0] is not None) for ended in whole for one in ended):
            break
    for task in pending:
        task.cancel()


def _checked(parts: Sequence[FoundPart], outcomes: Sequence[_Outcome]) -> list[tuple[FoundPart, PartReading]]:
    """Check the readings of a request. Raises InvalidRequest if a part itself is at fault."""
    checked: list[tuple[FoundPart, PartReading]] = []
    for part, outcome in zip(parts, outcomes, strict=True):
        if isinstance(outcome, InvalidRequest):
            raise outcome
        checked.append((part, outcome))
    return checked


def _skipped(part: FoundPart, *, soft: bool) -> _Outcome:
    return None, PartRecord(part.path, part.modality, part.sha256, len(part.data), "skipped", soft=soft)
