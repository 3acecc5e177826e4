"""A random sample of the device's decision records for its fleet, and counts of its labelled answers.

Records are sent without content, the client's name, the name of its session, and the hashes of parts. Of requests that
a constraint or their client binds to the device only the number is sent, and nothing of those whose parts stay here, or
that are bound to regions.

The sample is uniform at any time (reservoir sampling: Vitter, "Random sampling with a reservoir", ACM TOMS 11, 1985),
so that a pause while nothing can be sent makes each record stand for more requests, and none is lost.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec

from causeway_server.router.bundle.protocol import MAX_RECORDS, LabelCounts, SampledRecord, confidence_cell
from causeway_server.router.session_tags import PREFIX
from causeway_server.router.types import DecisionRecord, Reason

_MOST_BYTES = 8 * 1024  # of a record
MESSAGE_BYTES = 20 * 1024
"""Maximum size of the records in a message."""
_NOTHING: LabelCounts = (0, 0, 0, 0)


class RecordSample:
    """The sample since it was last taken. The control plane takes `per_hour` records, the owner gives `most_per_hour`;
    0: records and labels stay on the device. `private`: private requests since the start of the daemon.
    """

    def __init__(self, most_per_hour: float, monotonic: Callable[[], float], rng: random.Random | None = None) -> None:
        self._most_per_hour = most_per_hour
        self._monotonic = monotonic
        self._rng = rng or random.Random()
        self._held: list[DecisionRecord] = []
        self._seen = 0
        self._earned, self._earned_at = 0.0, monotonic()
        self._labels: dict[int, LabelCounts] = {}
        self.per_hour = 0.0
        self.private = 0

    def add(self, record: DecisionRecord) -> None:
        """Count a finished request, and hold its record if it is drawn."""
        decision = record.decision
        if decision is None or record.outcome.status not in ("ok", "error"):
            return  # a cache hit, or not decided
        if decision.on_device or decision.private:
            self.private += 1
            return
        if not self._rate or decision.parts_on_device or decision.regions is not None:
            return
        self._seen += 1
        if len(self._held) < MAX_RECORDS:
            self._held.append(record)
        elif (place := self._rng.randrange(self._seen)) < MAX_RECORDS:
            self._held[place] = record

    def label(self, confidence: float | None, *, good: bool, on_device: bool) -> None:
        """Count a labelled answer. `confidence`: of the device's answer; `on_device`: the device gave it."""
        if not self._most_per_hour:
            return
        cell = confidence_cell(confidence)
        was, now = self._labels.get(cell, _NOTHING), (good, not good, good and on_device, on_device and not good)
        self._labels[cell] = (was[0] + now[0], was[1] + now[1], was[2] + now[2], was[3] + now[3])

    def take_labels(self) -> dict[int, LabelCounts]:
        """Return the labels since they were last taken, by cell."""
        labels, self._labels = self._labels, {}
        return labels

    def take(self, most: int) -> tuple[SampledRecord, ...]:
        """Return at most so many records, as the rate allows, and begin another sample if there are any."""
        now = self._monotonic()
        if not self._rate:  # what was held before a refusal is not for the fleet
            self._held, self._seen, self._earned, self._earned_at = [], 0, 0.0, now
            return ()
        self._earned = min(MAX_RECORDS, self._earned + self._rate * (now - self._earned_at) / 3600.0)
        self._earned_at = now
        count = min(int(self._earned), len(self._held), most)
        chosen, size = [], 0
        for record in self._rng.sample(self._held, count):
            encoded = msgspec.json.encode(without_names(record))
            if len(encoded) <= _MOST_BYTES and size + len(encoded) <= MESSAGE_BYTES:
                chosen.append(encoded)
                size += len(encoded)
        if not chosen:
            return ()
        weight = self._seen / len(chosen)
        self._earned -= len(chosen)
        self._held, self._seen = [], 0
        return tuple(SampledRecord(weight=weight, record=msgspec.Raw(encoded)) for encoded in chosen)

    def forget(self, client: str) -> int:
        """Drop the held records of a client ("": of all), and return their number."""
        kept = [record for record in self._held if client not in ("", record.request.client)]
        dropped = len(self._held) - len(kept)
        if dropped:
            self._seen = round(self._seen * len(kept) / len(self._held))
            self._held = kept
        return dropped

    @property
    def _rate(self) -> float:
        return min(self.per_hour, self._most_per_hour)


def without_names(record: DecisionRecord) -> DecisionRecord:
    """Return the record without the client, its session and the hashes of parts; a replay takes them as unknown."""
    tags = tuple([tag for tag in record.request.tags if not tag.startswith(PREFIX)])
    outcome, decision = record.outcome, record.decision
    if decision is not None:
        decision = msgspec.structs.replace(decision, reasons=tuple(map(_without_values, decision.reasons)))
    attempts = tuple([msgspec.structs.replace(one, detail="") for one in outcome.attempts])
    return msgspec.structs.replace(
        record,
        request=msgspec.structs.replace(record.request, client="", tags=tags),
        unrecorded=(*record.unrecorded, "request.client"),
        decision=decision,
        outcome=msgspec.structs.replace(outcome, attempts=attempts),
        parts=(),
    )


def _without_values(reason: Reason) -> Reason:
    """Return the reason without the values that a condition read, which its error quotes."""
    return msgspec.structs.replace(reason, detail="") if reason.code == "rule_failed" else reason
