"""The promises of quality of the active policy's routes: their evidence, and the thresholds that decisions read.

A request of such a route is counted once its answer is complete. Of the answers, a share is drawn for a label: the
other side is asked the same (`serving.shadow`), and its answer is compared. What leaves no label, because it is bound
to the device, truncated, degraded or longer than is compared, is not counted: the promise is about the others.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from causeway_server.models.signals.calibration import Correction
from causeway_server.models.signals.promise import KeptPromise, PromiseDraw, PromiseRecord
from causeway_server.router.policy.compiled import Policy
from causeway_server.router.serving.metrics import Sample
from causeway_server.router.types import Confidence, PromiseSignals

log = logging.getLogger(__name__)

_SET_ASIDE = 16  # promises whose evidence is kept for their return


class Promises:
    """The kept promises by route.

    Attributes:
        signals: The states that decisions read, by route; a change replaces them.
    """

    def __init__(self) -> None:
        self.signals: dict[str, PromiseSignals] = {}
        self._kept: dict[str, KeptPromise] = {}
        self._earlier: dict[str, PromiseRecord] = {}
        self._models: dict[str, str] = {}  # the edge model whose confidence a route's promise counts
        self._corrections: Mapping[str, Correction] = {}

    def use(self, policy: Policy, weights: Callable[[str], str], pairs: Mapping[str, str]) -> None:
        """Follow another policy. The evidence of a promise goes on if its words and the models are the same.

        Args:
            weights: Returns the hash of an edge model's files.
            pairs: Hashes of calibrated signals, by edge model.
        """
        self._earlier = {record.identity: record for record in self.records[-_SET_ASIDE:]}
        models = [
            f"{one.model} {weights(one.model)} {pairs.get(one.model, '')}" for one in policy.targets if one.at == "edge"
        ]
        self._kept, self._models = {}, {}
        for route in policy.routes:
            if route.promise is not None:
                self._models[route.name] = next((one.model for one in route.targets if one.at == "edge"), "")
                large = next(one.model for one in route.targets if one.name == route.promise.of)
                words = msgspec.json.encode((route.promise, large, models)).decode()
                identity = f"{route.name} {words}"
                self._kept[route.name] = KeptPromise(
                    route.promise, self._earlier.get(identity) or PromiseRecord(identity)
                )
        self.read_with(self._corrections)

    def restore(self, records: Sequence[PromiseRecord]) -> None:
        """Go on with the evidence of an earlier run."""
        self._earlier |= {record.identity: record for record in records}
        for name, kept in self._kept.items():
            record = self._earlier.get(kept.record.identity)
            if record is not None and not kept.record.answers:
                self._kept[name] = KeptPromise(kept.promise, record)
        self.read_with(self._corrections)

    def read_with(self, corrections: Mapping[str, Correction]) -> None:
        """Read the evidence with the corrections of confidences by the device's refits, by edge model."""
        self._corrections = corrections
        for name, kept in self._kept.items():
            kept.read_with(corrections.get(self._models[name], Correction()))
        self._publish()

    @property
    def records(self) -> list[PromiseRecord]:
        """The evidence to store, with the newest of promises that are set aside, which may come back."""
        used = {kept.record.identity: kept.record for kept in self._kept.values()}
        return [*(one for identity, one in self._earlier.items() if identity not in used), *used.values()]

    @property
    def alarms(self) -> int:
        """The number of alarms of the active policy's promises so far."""
        return sum(kept.record.alarms for kept in self._kept.values())

    def draw(
        self, route: str, confidence: Confidence | None, rng: random.Random, *, on_device: bool
    ) -> PromiseDraw | None:
        """Count a complete answer; return its draw if it is to be labelled.

        Args:
            confidence: The confidence of the device's first tokens; None without any.
        """
        kept = self._kept.get(route)
        if kept is None or (on_device and confidence is None):
            return None
        draw = PromiseDraw(on_device, kept.draw_share(on_device=on_device), confidence is not None, kept.binds)
        kept.count(*_stated(confidence))
        return draw if rng.random() < draw.share else None

    def label(self, route: str, confidence: Confidence | None, draw: PromiseDraw, *, good: bool | None) -> None:
        """Take the label of a drawn answer into account. `good`: None if the comparison failed."""
        kept = self._kept.get(route)
        if kept is None:
            return
        if good is None or confidence is None:
            kept.miss(draw)
        else:
            kept.label(confidence.stated, draw, good=good, kind=confidence.kind)
        self._publish()

    def object(self, route: str, confidence: Confidence) -> None:
        """Take a client's bad score of an answer of the device into account."""
        if (kept := self._kept.get(route)) is not None:
            kept.object(confidence.stated, confidence.kind)
            self._publish()

    @property
    def problems(self) -> Iterator[str]:
        """Yield a sentence for each promise whose evidence was dropped."""
        for name, kept in self._kept.items():
            if kept.record.closed and kept.record.why:
                yield f"The promise of the route {name} lacks evidence: {kept.signals.detail}."

    def samples(self) -> Iterator[Sample]:
        """Yield the evidence of each promise."""
        for name, kept in self._kept.items():
            labels, record, threshold = (("route", name),), kept.record, kept.signals.threshold
            open_below = 1.0 if threshold is None else threshold
            bound = min(1.0, kept.wrong_at_most / max(1.0, record.requests))
            yield from (
                Sample("causeway_edge_promise_threshold", open_below, labels),
                Sample("causeway_edge_promise_labels", record.answers, labels),
                Sample("causeway_edge_promise_requests", record.requests, labels),
                Sample("causeway_edge_promise_wrong", bound, labels),
                Sample("causeway_edge_promise_alarms", record.alarms, labels),
            )

    def _publish(self) -> None:
        signals = {name: kept.signals for name, kept in self._kept.items()}
        for name, state in signals.items():
            was = self.signals.get(name)
            if was is not None and (was.threshold is None) != (state.threshold is None):
                why = f"hands off below {state.threshold:.3f}" if state.threshold is not None else state.detail
                log.warning("The promise of the route %s has a new state: %s.", name, why)
        self.signals = signals


def _stated(confidence: Confidence | None) -> tuple[float | None, int]:
    return (None, 0) if confidence is None else (confidence.stated, confidence.kind)
