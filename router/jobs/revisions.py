"""Revised answers: an answer that was made without a late part is made anew when the part has been read.

At most one revision for each kind of part. Revisions are numbered from 1; the answer itself is number 0. Each of them
replaces the answer before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal

import msgspec

from ..errors import CausewayError, DeadlineExceeded, JobCancelled
from ..types import Modality, PartRecord

REVISED: Final = "job.revised"
"""The event that carries a revised answer."""
NOT_REVISED: Final = "job.not_revised"
"""The event that says that no revision follows any more, and why."""
MOST_LATE: Final = 16
"""Answers of one process that wait for late parts at a time: each holds its request in memory."""
RevisionOutcome = Literal["made", "too_late", "failed", "cancelled", "no_room"]
"""Not `made`: the part was not read in time, or the job's deadline passed; it could not be read, or the run failed; the
job was cancelled; too many answers wait for late parts."""


class RevisionDropped(CausewayError):
    """A late part will not revise the answer, which stays as it is."""

    code = "revision_dropped"

    def __init__(self, message: str, outcome: RevisionOutcome = "failed") -> None:
        super().__init__(message)
        self.outcome = outcome


def no_room() -> RevisionDropped:
    """Return the error of an answer that cannot wait for its late parts."""
    return RevisionDropped(f"{MOST_LATE} other answers wait for late parts", "no_room")


def outcome_of(error: CausewayError) -> RevisionOutcome:
    """Return what became of the revisions of an answer, if this error ended them."""
    if isinstance(error, RevisionDropped):
        return error.outcome
    if isinstance(error, DeadlineExceeded):
        return "too_late"
    return "cancelled" if isinstance(error, JobCancelled) else "failed"


class LateTerms(msgspec.Struct, frozen=True):
    """How long parts are read whose branch is late. `by`: monotonic, s.

    `absent`: kinds that this answer does not wait for.
    """

    by: float
    absent: tuple[Modality, ...] = ()


class LateParts(msgspec.Struct, frozen=True):
    """What an answer lacks, and may be revised for.

    `kinds`: of the parts that are being read. `until`: when that ends, s. `target`: of the cloud, once the request of
    the next revision may have been sent there: it is made nowhere else.
    """

    kinds: tuple[Modality, ...]
    until: float
    target: str = ""


def late_kinds(parts: Iterable[PartRecord]) -> tuple[Modality, ...]:
    """Return the kinds of part that an answer was made without, and that may still be read."""
    return tuple(sorted({part.modality for part in parts if part.status in ("timeout", "skipped") and not part.soft}))


def check_read(parts: Sequence[PartRecord], kind: Modality) -> None:
    """Raise RevisionDropped unless all parts of this kind were read."""
    statuses = {part.status for part in parts if part.modality == kind}
    if "failed" in statuses or not statuses:
        raise RevisionDropped(f"{kind}: it could not be read")
    if statuses != {"ok"}:
        raise RevisionDropped(f"{kind}: it was not read in time", "too_late")


def check_revised(parts: Iterable[PartRecord], kinds: Iterable[Modality]) -> None:
    """Raise RevisionDropped unless an answer was made with all parts of these kinds, which had been read before."""
    kinds = set(kinds)
    if any(part.modality in kinds and part.status != "ok" for part in parts):
        raise RevisionDropped("what was read of a late part is no longer known")


def revision_id(job: str, revision: int) -> str:
    """Return the name of one revision of a job: of its event, and its Idempotency-Key elsewhere."""
    return f"{job}.r{revision}" if revision else job
