"""What the encoders found in one request, and what became of each of its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from router.types import Fact, Modality, PartRecord, PartStatus

_WORST: tuple[PartStatus, ...] = ("failed", "timeout", "skipped", "ok")


class RequestFacts(msgspec.Struct, frozen=True):
    """What the encoders found in one request. A fact is None if its branch did not end in time."""

    kinds: tuple[Modality, ...] = ()  # those that encoders were asked about
    facts: Mapping[tuple[int, int], Fact | None] = {}  # by message and index of the part
    records: tuple[PartRecord, ...] = ()

    def summary(self, kinds: Sequence[Modality]) -> str:
        """The state of each of these kinds of parts, ``audio=ok,image=timeout``: the worst of its parts."""
        found: dict[Modality, set[PartStatus]] = {}
        for record in self.records:
            if record.modality in kinds:
                found.setdefault(record.modality, set()).add(record.status)
        worst = {kind: next(status for status in _WORST if status in found[kind]) for kind in sorted(found)}
        return ",".join(f"{kind}={status}" for kind, status in worst.items())

    def complete(self, kinds: Sequence[Modality]) -> bool:
        return all(record.status == "ok" for record in self.records if record.modality in kinds)

    def says(self, kind: Modality) -> bool | None:
        """Whether there are words in a part of this kind; None if that hangs on a part that was not read."""
        if any(fact is not None and fact.text for fact in self._of(kind)):
            return True
        return None if None in self._of(kind) else False

    @property
    def language(self) -> str | None:
        """The language of the first sound in which somebody speaks."""
        return next((fact.language for fact in self._of("audio") if fact is not None and fact.language), None)

    def _of(self, kind: Modality) -> list[Fact | None]:
        return [fact for fact, record in zip(self.facts.values(), self.records, strict=True) if record.modality == kind]

    def joined(self, more: RequestFacts) -> RequestFacts:
        """These and `more`, about other kinds of the same request."""
        return RequestFacts((*self.kinds, *more.kinds), {**self.facts, **more.facts}, (*self.records, *more.records))
