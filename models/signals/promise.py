"""A route's promise of quality, kept by labelled answers: the threshold of its handoff, and the evidence behind it.

A label says whether the device's answer to a request is as good as the cloud's. An answer is wrong for the promise if
the device gave it, and it is not as good; the promise allows a share of 1 - `keep` of all requests. Three parts:

1. Curve: requests, labels and bad answers by confidence, which fade with time. Given its confidence, an answer's label
   tells the same wherever the request was answered, so that answers of the cloud, which cost no call to label, count
   as much. The threshold is the lowest one at which the estimated share of wrong answers is within the allowance.
2. Account: an upper bound of the wrong answers so far, valid at all times together. An answer is drawn for a label with
   a known share p, and each drawn wrong answer multiplies a supermartingale by 1 - c / p while each wrong answer,
   drawn or not, divides it by 1 - c; Ville's inequality bounds their number, whoever chooses the requests (a mixture
   over three c, `risk` shared among them). If the bound exceeds the promise with its tolerance, the threshold rises,
   up to the cloud alone.
3. Alarm: e-values against "the share of wrong answers is within the allowance", as an e-detector (Shin, Ramdas and
   Rinaldo, "E-detectors", 2023: the maximum with 1 restarts them). A product of bets on each request, where a labelled
   wrong answer wins. In doubt more answers are labelled, and the allowance is cut; at an alarm the evidence is dropped,
   the cloud answers, and the device's answers are compared in the background, twice as many after each further alarm.

Bad feedback counts as a label without a draw: it can raise the threshold and never lowers it.

The curve counts confidences as the shipped calibration states them, by the prompt's kind. A correction by the
device's refit changes only how it is read: each cell of a kind is spread over the cells of the corrected confidence.
Account and alarm are about wrong answers, whatever threshold let them pass. So no evidence is lost when a refit begins
or ends.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import msgspec

from causeway_server.router.types import Promise, PromiseSignals

from .calibration import Correction, log_odds, probability_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CELLS: Final = 32
_LOWEST, _STEP = -3.0, 0.25  # log odds of confidence: the lower end of the cells, and their width
_MEMORY: Final = 2000.0  # requests after which evidence has faded to 1/e
_CAUTION: Final = 0.1  # standard errors by which the curve's estimate is raised
_HORIZON: Final = 2500.0  # requests over which the account's slack is spent
_OVER: Final = 1.1  # largest share of wrong answers that is aimed at, as a multiple of the allowance
_STAKES: Final = (0.1, 0.25, 0.45)  # c of the account, as shares of p
_BETS: Final = (0.5, 1.0, 3.0)  # the alarm's bets: a wrong answer is 1.5, 2 and 4 times as frequent as allowed
_DOUBT, _ALARM = 3.0, 100.0  # e-values
_DOUBTED_ALLOWANCE: Final = 0.6
_DOUBTED_SHARE: Final = 0.4  # share of the device's answers that are labelled in doubt
_CLOUD_SHARE, _CLOSED_SHARE = 0.25, 0.5  # shares of the cloud's answers that are labelled: open, and closed
_LEAST: Final = 120  # labels before the device answers
_MOST: Final = 4000
_RELAPSE: Final = 4000.0  # requests within which a further alarm doubles the labels before the device answers again
_KEPT: Final = 0.1  # share of the evidence that an alarm leaves
_LEAST_COVERED, _LEAST_DRAWN = 0.5, 20
_RESCALE: Final = 1e100


class PromiseRecord(msgspec.Struct):
    """The state of a promise, for the device's storage. `identity`: what it is about, which another one replaces."""

    identity: str
    requests: float = 0.0
    answers: int = 0
    weight: float = 1.0
    seen: list[float] = msgspec.field(default_factory=lambda: [0.0] * CELLS)
    labels: list[float] = msgspec.field(default_factory=lambda: [0.0] * CELLS)
    bad: list[float] = msgspec.field(default_factory=lambda: [0.0] * CELLS)
    losses: list[float] = msgspec.field(default_factory=lambda: [0.0] * len(_STAKES))
    bets: list[float] = msgspec.field(default_factory=lambda: [1.0] * len(_BETS))
    fresh: int = 0  # labels since it was closed
    need: int = _LEAST
    closed: bool = True
    why: str = ""  # why it was closed
    alarms: int = 0
    alarmed_at: float = -_RELAPSE
    drawn: float = 0.0
    missed: float = 0.0


class PromiseDraw(msgspec.Struct, frozen=True):
    """An answer that is drawn for a label, with a probability of `share`. `counted`: its confidence is counted."""

    on_device: bool
    share: float
    counted: bool
    binds: bool = True  # whether the promise was about this answer: one that only measures is about none before


class KeptPromise:
    """The evidence of one promise. Pure: requests and labels in, a threshold out.

    `signals`: the threshold and what is behind it, replaced when it changes. `share` of the device's answers is drawn
    now.
    """

    def __init__(self, promise: Promise, record: PromiseRecord) -> None:
        self.promise, self.record = promise, record
        self._correction = Correction()
        self._spread: NDArray[np.float64] | None = None  # [cells of all kinds, cells]
        self._allowance = 1.0 - promise.keep
        self.share = promise.shadow
        self.signals = PromiseSignals()
        self._look()

    def draw_share(self, *, on_device: bool) -> float:
        """Return the probability with which the next answer is to be drawn for a label."""
        if on_device:
            return self.share
        return _CLOSED_SHARE if self.record.closed else _CLOUD_SHARE

    @property
    def binds(self) -> bool:
        """Whether the next answers are held to the promise."""
        return not self.promise.only_where_measured or self.signals.threshold is not None

    def read_with(self, correction: Correction) -> None:
        """Read the evidence with another correction of the confidence, and choose the threshold again."""
        if correction != self._correction:
            self._correction, self._spread = correction, None
            self._choose()

    def count(self, confidence: float | None, kind: int = 0) -> None:
        """Count a request that the device or the cloud answered. `confidence`: None if the device made none."""
        record = self.record
        record.requests += self.binds
        record.weight *= 1.0 + 1.0 / _MEMORY
        if record.weight > _RESCALE:
            record.seen, record.labels, record.bad = (
                [value / record.weight for value in values] for values in (record.seen, record.labels, record.bad)
            )
            record.weight = 1.0
        if confidence is not None:
            record.seen[self._cell(confidence, kind)] += record.weight
        if not record.closed:
            cost = self.share * self._allowance
            record.bets = [max(1.0, value * (1.0 - bet * cost)) for value, bet in zip(record.bets, _BETS, strict=True)]

    def label(self, confidence: float, draw: PromiseDraw, *, good: bool, kind: int = 0) -> None:
        """Take the label of a drawn answer into account. `confidence`: of the device's answer, 0 to 1."""
        record, cell = self.record, self._cell(confidence, kind)
        record.answers += 1
        record.labels[cell] += record.weight
        record.bad[cell] += 0.0 if good else record.weight
        if not draw.counted:
            record.seen[cell] += record.weight / draw.share
        if draw.on_device:
            self._drawn(missed=False)
            if not good and draw.binds:
                self._lose(draw.share * max(_LEAST_COVERED, 1.0 - record.missed / record.drawn), 1.0)
        if record.closed:
            record.fresh += 1
            if record.fresh >= record.need:
                record.closed, record.bets = False, [1.0] * len(_BETS)
        self._look()

    def miss(self, draw: PromiseDraw) -> None:
        """Note that a drawn answer got no label. Labels must not be missing because of what an answer says."""
        if draw.on_device:
            self._drawn(missed=True)
            record = self.record
            if record.drawn >= _LEAST_DRAWN and record.missed > (1.0 - _LEAST_COVERED) * record.drawn:
                self._suspend("most comparisons with the cloud fail")
                self._choose()

    def object(self, confidence: float, kind: int = 0) -> None:
        """Take bad feedback on an answer of the device into account."""
        cell = self._cell(confidence, kind)
        self.record.labels[cell] += self.record.weight
        self.record.bad[cell] += self.record.weight
        if self.binds:
            self._lose(1.0, self.share)
        self._look()

    @property
    def wrong_at_most(self) -> float:
        """The upper bound of the wrong answers so far, with a probability of 1 - `risk` at all times together."""
        start = math.log(len(_STAKES) / self.promise.risk)
        stakes = [stake * self.promise.shadow for stake in _STAKES]
        return min((loss + start) / -math.log1p(-stake) for loss, stake in zip(self.record.losses, stakes, strict=True))

    def _cell(self, confidence: float, kind: int) -> int:
        """Return the place of a confidence in the curve, which grows with the kinds."""
        record, kinds = self.record, kind + 1
        if len(record.seen) < kinds * CELLS:
            for values in (record.seen, record.labels, record.bad):
                values.extend([0.0] * (kinds * CELLS - len(values)))
        return kind * CELLS + cell_of(confidence)

    def _read(self, values: list[float]) -> list[float]:
        """Return a part of the curve by the cells of the corrected confidence, of all kinds together."""
        if len(values) == CELLS and self._correction == Correction():
            return values
        import numpy as np  # on demand: only calibrated pairs tell kinds apart

        if self._spread is None or len(self._spread) < len(values):
            self._spread = np.array([_spread(self._correction, *divmod(at, CELLS)) for at in range(len(values))])
        read: list[float] = (np.array(values) @ self._spread[: len(values)]).tolist()
        return read

    def _drawn(self, *, missed: bool) -> None:
        record = self.record
        record.drawn, record.missed = record.drawn + 1.0, record.missed + missed
        if record.drawn > 1000.0:
            record.drawn, record.missed = record.drawn / 2.0, record.missed / 2.0

    def _lose(self, share: float, bet_on: float) -> None:
        """Count a wrong answer that was found with a probability of `share`."""
        record = self.record
        for at, stake in enumerate(_STAKES):
            record.losses[at] -= math.log1p(-min(stake * self.promise.shadow / share, 0.99))
        if not record.closed:
            record.bets = [value * (1.0 + bet * bet_on) for value, bet in zip(record.bets, _BETS, strict=True)]

    def _look(self) -> None:
        """Look at the alarm's e-value, and choose the threshold."""
        record = self.record
        doubt = 0.0 if record.closed else sum(record.bets) / len(_BETS)
        if doubt > _ALARM:
            record.alarms += 1
            self._close("the quality fell")
            doubt = 0.0
        self.share = max(self.promise.shadow, _DOUBTED_SHARE) if doubt > _DOUBT else self.promise.shadow
        self._choose()

    def _suspend(self, why: str) -> None:
        """Close it until there are labels again: what is known stays known."""
        record = self.record
        if not record.closed:
            record.closed, record.why, record.fresh, record.need = True, why, 0, _LEAST
            self.share = self.promise.shadow
        record.drawn = record.missed = 0.0

    def _close(self, why: str) -> None:
        record = self.record
        relapsed = record.requests - record.alarmed_at < _RELAPSE
        record.need = min(2 * record.need, _MOST) if relapsed else _LEAST
        record.alarmed_at, record.why = record.requests, why
        record.labels = [value * _KEPT for value in record.labels]
        record.bad = [value * _KEPT for value in record.bad]
        record.closed, record.fresh, record.drawn, record.missed = True, 0, 0.0, 0.0
        self.share = self.promise.shadow

    def _choose(self) -> None:
        record, promise = self.record, self.promise
        threshold, detail = None, ""
        if record.closed:
            why = f"{record.why}: " if record.why else ""
            detail = f"{why}{record.fresh} of {record.need} labelled answers"
        else:
            allowed = (self._allowance + promise.tolerance) * (record.requests + _HORIZON) - self.wrong_at_most
            target = min(self._allowance * _OVER, allowed / _HORIZON)
            threshold = self._lowest(target * (_DOUBTED_ALLOWANCE if self.share > promise.shadow else 1.0))
            detail = "" if threshold is not None else "the allowance of wrong answers is spent"
        self.signals = PromiseSignals(threshold, record.answers, detail)

    def _lowest(self, allowed: float) -> float | None:
        """Return the lowest threshold at which the share of wrong answers is estimated as `allowed`; None for none.

        A cell's share of bad answers is that of its labels, half those of its neighbours, and half an answer as bad as
        those above it. Within a cell the risk is taken as linear.
        """
        record, weight = self.record, self.record.weight
        seen = self._read(record.seen)
        total = sum(seen)
        if allowed <= 0.0 or not total:
            return None
        labels, bad = (
            [0.0, *[value / weight for value in self._read(one)], 0.0] for one in (record.labels, record.bad)
        )
        above_labels, above_bad = 2.0, 0.2
        risk, variance, before = 0.0, 0.0, 0.0
        for cell in range(CELLS - 1, -1, -1):
            count = labels[cell + 1] + 0.5 * (labels[cell] + labels[cell + 2]) + 0.5
            found = bad[cell + 1] + 0.5 * (bad[cell] + bad[cell + 2]) + 0.5 * above_bad / above_labels
            share, wrong = seen[cell] / total, min(1.0, found / count)
            risk += share * wrong
            variance += share * share * (wrong * (1.0 - wrong) + 0.01) / count
            above_labels, above_bad = above_labels + labels[cell + 1], above_bad + bad[cell + 1]
            bound = risk + _CAUTION * math.sqrt(variance)
            if bound > allowed:
                if cell == CELLS - 1:
                    return None  # also the surest answers are wrong too often
                odds = _LOWEST + _STEP * (cell + 1 - (allowed - before) / (bound - before))
                return probability_of(odds)
            before = bound
        return 0.0


def cell_of(confidence: float) -> int:
    """Return the cell of a confidence, 0 to 1."""
    return min(max(int((log_odds(confidence) - _LOWEST) / _STEP), 0), CELLS - 1)


def _spread(correction: Correction, kind: int, cell: int) -> list[float]:
    """Return the share of a cell's width that each cell of the corrected confidence gets."""
    low, high = ((correction.odds(_LOWEST + _STEP * (cell + end), kind) - _LOWEST) / _STEP for end in (0, 1))
    shares = [0.0] * CELLS
    for at in range(math.floor(low), math.ceil(high)):
        shares[min(max(at, 0), CELLS - 1)] += (min(high, at + 1) - max(low, at)) / (high - low)
    return shares
