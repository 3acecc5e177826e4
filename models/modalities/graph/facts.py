"""What the encoders found in one request, and what became of each of its parts; of a sound, also as a transcript."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from router.errors import UnsupportedFeature
from router.openai.audio import GRANULARITIES, Transcript, TranscriptSegment, TranscriptWord
from router.parts.reading import FoundPart
from router.types import Fact, Modality, PartRecord, PartStatus

from ...llama_cpp.protocol import SoftTokens
from ..process.messages import Found

PartReading = tuple[Fact | SoftTokens | None, PartRecord]
"""What was found of a part; None: nothing in time."""
_WORST: tuple[PartStatus, ...] = ("failed", "timeout", "skipped", "ok")


class RequestFacts(msgspec.Struct, frozen=True):
    """What the encoders found in one request. A fact is None if its branch did not end in time."""

    kinds: tuple[Modality, ...] = ()  # those that encoders were asked about
    facts: Mapping[tuple[int, int], Fact | None] = {}  # by message and index of the part
    records: tuple[PartRecord, ...] = ()

    def says(self, kind: Modality) -> bool | None:
        """Whether there are words in a part of this kind; None if a part that may have some was not read."""
        if any(fact is not None and fact.text for fact in self._of(kind)):
            return True
        return None if None in self._of(kind) else False

    @property
    def language(self) -> str | None:
        """The language of the first sound with speech in it."""
        return next((fact.language for fact in self._of("audio") if fact is not None and fact.language), None)

    def _of(self, kind: Modality) -> list[Fact | None]:
        return [fact for fact, record in zip(self.facts.values(), self.records, strict=True) if record.modality == kind]

    def joined(self, more: RequestFacts) -> RequestFacts:
        """Return these facts and `more`, which are about other kinds of part of the same request."""
        return RequestFacts((*self.kinds, *more.kinds), {**self.facts, **more.facts}, (*self.records, *more.records))


class RequestSoftTokens(msgspec.Struct, frozen=True):
    """The soft tokens of one request's parts for one model. They are None if the branch did not end in time.

    `projector`: the digest of the one that made them, "" if there was none.
    """

    model: str
    projector: str
    tokens: Mapping[tuple[int, int], SoftTokens | None]  # by message and index of the part
    records: tuple[PartRecord, ...]

    @property
    def markers(self) -> dict[tuple[int, int], str]:
        """The mark of each part in the text; "" for a part without soft tokens."""
        return {place: "" if soft is None else soft.text for place, soft in self.tokens.items()}

    @property
    def distinct(self) -> tuple[SoftTokens, ...]:
        """The soft tokens that were made, equal ones once."""
        return tuple({soft.marker: soft for soft in self.tokens.values() if soft is not None}.values())


def summary(records: Sequence[PartRecord]) -> str:
    """The state of each kind of these parts, ``audio=ok,image=timeout``: the worst of its parts."""
    found: dict[Modality, set[PartStatus]] = {}
    for record in records:
        found.setdefault(record.modality, set()).add(record.status)
    worst = {kind: next(status for status in _WORST if status in found[kind]) for kind in sorted(found)}
    return ",".join(f"{kind}={status}" for kind, status in worst.items())


def facts_of(kinds: Sequence[Modality], read: Sequence[tuple[FoundPart, PartReading]]) -> RequestFacts:
    """Put together what was found of parts of these kinds."""
    own = [(part, found, record) for part, (found, record) in read if not record.soft]
    facts = {(part.message, part.index): found for part, found, _ in own if not isinstance(found, SoftTokens)}
    return RequestFacts(tuple(kinds), facts, tuple(record for *_, record in own))


def soft_tokens_of(model: str, projector: str, read: Sequence[tuple[FoundPart, PartReading]]) -> RequestSoftTokens:
    """Put together the soft tokens among what was found."""
    own = [(part, found, record) for part, (found, record) in read if record.soft]
    tokens = {(part.message, part.index): found for part, found, _ in own if not isinstance(found, Fact)}
    return RequestSoftTokens(model, projector, tokens, tuple(record for *_, record in own))


def transcript_of(found: Found, seconds: float, *, words: bool = False) -> Transcript:
    """Return the transcript of a sound of this length. Whisper's time stamps may lie after its end; these do not.

    Raises:
        UnsupportedFeature: `words` are asked for, and the model that understood the sound gives no times of words.
    """
    timed = tuple(
        TranscriptWord(word.text, min(word.start_s, seconds), min(word.end_s, seconds))
        for segment in found.segments
        for word in segment.words
    )
    if words and found.fact.text and not timed:
        message = f"`{GRANULARITIES}`: the model of this tier or device gives no times of words. Send `segment`."
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
