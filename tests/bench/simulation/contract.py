"""The contract of quality on generated streams, with the product's own evidence: `python -m tests.bench contract`.

The user of this part: a device that answers 20,000 requests of one route a week or a day, whose model agrees with the
cloud's in 50 to 90 % of them; its confidence is stated too high or too low, and too steep or too flat. Load: 250
streams each that are steady, that fall at once (and in half of them recover), that drift slowly, and that follow a
season, in quality and in confidence. Labels come at the contract's own rates, and each label of an answer of the
device is a call to the cloud. Faults: a drop of ten points in the quality of the device's answers, and requests of an
adversary that sees the threshold and all evidence, but not which answer is drawn.

A stream is broken if its quality, or that of any 1,000 requests in a row, is below the promise by more than the
tolerance (six times as much for the 1,000); of an adversary's stream the whole is judged. The oracle knows the law of
the stream: it moves its threshold every 500 requests so that the expected quality is the promise, and needs no labels.
Parameters were chosen on streams with `--seed 0`; the figures are those of another seed.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from causeway_server.models.signals.promise import KeptPromise, PromiseDraw, PromiseRecord
from causeway_server.router.types import Promise

from ..rows import Row

KEEP = 0.95
PROMISE = Promise("large", KEEP, 0.05, 0.01, 0.06, only_where_measured=False)
ALLOWED, WINDOW, BLOCK = 1 - KEEP, 1_000, 500
KINDS = ("steady", "abrupt", "slow", "seasonal")
ATTACKS = ("all at once", "below the doubt", "steadily")
DROP_AT, DROP = 8_000, 0.10
Floats = NDArray[np.float64]


@dataclass
class Stream:
    """Requests: stated log odds of the device's answers, and the law by which these are good."""

    odds: Floats
    shift: Floats  # of the true log odds
    slope: float
    bad: NDArray[np.bool_]

    @classmethod
    def draw(cls, rng: np.random.Generator, kind: str, size: int) -> Stream:
        odds = rng.normal(rng.uniform(0.6, 1.6), rng.uniform(1.1, 1.9), size)
        shift, slope = np.full(size, rng.uniform(-0.6, 0.6)), rng.uniform(0.7, 1.2)
        time = np.arange(size) / size
        if kind == "abrupt":
            start = rng.uniform(0.1, 0.9)
            end = 1.0 if rng.random() < 0.5 else rng.uniform(start, 1.0)
            shift = shift - rng.uniform(0.5, 2.0) * ((time >= start) & (time < end))
        elif kind == "slow":
            shift = shift + rng.uniform(-1.5, 0.75) * time
            odds = odds + rng.uniform(-0.5, 0.5) * time
        elif kind == "seasonal":
            shift = shift + rng.uniform(0.2, 0.6) * np.sin(2 * np.pi * (time * rng.uniform(1.0, 4.0) + rng.random()))
            odds = odds + rng.uniform(0.0, 0.4) * np.sin(2 * np.pi * (time * rng.uniform(1.0, 4.0) + rng.random()))
        return cls(odds, shift, slope, np.zeros(size, bool)).drawn(rng)

    def drawn(self, rng: np.random.Generator) -> Stream:
        self.bad = rng.random(len(self.odds)) < self.chance(self.odds, self.shift)
        return self

    def chance(self, odds: Floats, shift: Floats | float) -> Floats:
        """Return the probability that an answer is bad."""
        return 1 / (1 + np.exp(shift + self.slope * odds))

    def oracle(self) -> float:
        """Return the share on the device of the threshold that always just keeps the promise in expectation."""
        share = 0.0
        for start in range(0, len(self.odds), BLOCK):
            near = np.sort(self.odds[max(0, start - WINDOW) : start + BLOCK + WINDOW])[::-1]
            shifts, counts = np.unique(np.round(self.shift[start : start + BLOCK], 2), return_counts=True)
            chances = sum(count * self.chance(near, shift) for shift, count in zip(shifts, counts, strict=True))
            wrong = np.cumsum(chances / counts.sum()) / len(near)
            share += np.searchsorted(wrong, ALLOWED) / len(near) * counts.sum()
        return float(share / len(self.odds))


@dataclass
class Served:
    """What became of a stream: answers of the device, those that were wrong, and those that the cloud was asked for."""

    device: NDArray[np.bool_]
    wrong: NDArray[np.bool_]
    labelled: NDArray[np.bool_]
    labels: NDArray[np.int64]  # so far, of answers of both sides
    thresholds: Floats
    alarms: int

    @property
    def share(self) -> float:
        """The share on the device; an answer that the cloud is asked for as well counts as the cloud's."""
        return float(np.mean(self.device & ~self.labelled))

    @property
    def shortfalls(self) -> tuple[float, float]:
        """Return how far the quality is below the promise: of the stream, and of the worst window."""
        sums = np.concatenate([[0], np.cumsum(self.wrong)])
        return sums[-1] / len(self.wrong) - ALLOWED, (sums[WINDOW:] - sums[:-WINDOW]).max() / WINDOW - ALLOWED

    @property
    def is_broken(self) -> bool:
        whole, window = self.shortfalls
        return whole > PROMISE.tolerance or window > 6 * PROMISE.tolerance


Requests = Callable[[KeptPromise], tuple[float, bool]]


def serve(requests: Requests, size: int, seed: int) -> Served:
    """Serve a stream under the contract. `requests`: returns each one's confidence, and whether its answer is bad."""
    kept, draw = KeptPromise(PROMISE, PromiseRecord("bench")), random.Random(seed)
    device, wrong, labelled = (np.zeros(size, bool) for _ in range(3))
    labels, thresholds = np.zeros(size, np.int64), np.full(size, 1.0)
    for at in range(size):
        confidence, bad = requests(kept)
        threshold = kept.signals.threshold
        asked = threshold is not None
        on_device = threshold is not None and confidence >= threshold
        share = kept.draw_share(on_device=on_device)
        kept.count(confidence if asked else None)
        device[at], wrong[at], thresholds[at] = on_device, on_device and bad, 2.0 if threshold is None else threshold
        if draw.random() < share:
            labelled[at] = on_device
            kept.label(confidence, PromiseDraw(on_device, share, asked), good=not bad)
        labels[at] = kept.record.answers
    return Served(device, wrong, labelled, labels, thresholds, kept.record.alarms)


def listed(stream: Stream) -> Requests:
    confidences = (1 / (1 + np.exp(-stream.odds))).tolist()
    each: Iterator[tuple[float, bool]] = zip(confidences, stream.bad.tolist(), strict=True)
    return lambda _: next(each)


def attack(rng: random.Random, kind: str) -> Requests:
    """Return an adversary's requests. It is good while the device is not asked, so that the threshold falls."""

    def each(kept: KeptPromise) -> tuple[float, bool]:
        threshold = kept.signals.threshold
        if threshold is None:
            return rng.random(), False
        bets = sum(kept.record.bets) / len(kept.record.bets)
        bad = kind == "all at once" or (kind == "below the doubt" and bets < 1.2) or rng.random() < 0.12
        return (min(0.999, threshold + 0.01), True) if bad else (rng.random(), False)

    return each


def kept_of(at: int, kind: str, size: int, seed: int) -> tuple[bool, float, float, float, float, int]:
    rng = np.random.default_rng((seed, KINDS.index(kind), at))
    stream = Stream.draw(rng, kind, size)
    served = serve(listed(stream), size, at)
    return (served.is_broken, served.share, stream.oracle(), *served.shortfalls, served.alarms)


def found_after(at: int, size: int, seed: int) -> int:
    """Return the labels from a drop until the expected quality is within the tolerance again; -1 if never."""
    rng = np.random.default_rng((seed, 7, at))
    stream = Stream.draw(rng, "steady", size)
    near, shift = np.sort(stream.odds)[::-1], float(stream.shift[0])
    answered = near[: max(1, int(np.searchsorted(np.cumsum(stream.chance(near, shift)) / size, ALLOWED)))]
    before = stream.chance(answered, shift).mean()
    fallen = next(d for d in np.arange(0, 6, 0.02) if stream.chance(answered, shift - d).mean() >= before + DROP)
    stream.shift = np.where(np.arange(size) < DROP_AT, shift, shift - fallen)
    served = serve(listed(stream.drawn(rng)), size, at)
    chances = stream.chance(near, shift - fallen)
    risks = np.concatenate([[0.0], np.cumsum(chances)]) / size
    odds = np.log(np.clip(served.thresholds, 1e-9, 1 - 1e-9) / np.clip(1 - served.thresholds, 1e-9, 1))
    counts = size - np.searchsorted(near[::-1], np.where(served.thresholds > 1, np.inf, odds))
    within = np.flatnonzero(risks[counts[DROP_AT:]] <= ALLOWED + PROMISE.tolerance)
    return int(served.labels[DROP_AT + within[0]] - served.labels[DROP_AT]) if len(within) else -1


def attacked(at: int, kind: str, size: int, seed: int) -> tuple[bool, float, float]:
    served = serve(attack(random.Random(f"{seed} {kind} {at}"), kind), size, at)
    whole, window = served.shortfalls
    return whole > PROMISE.tolerance, whole, window


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=1_000, help="of all four kinds together")
    parser.add_argument("--requests", type=int, default=20_000, help="of each stream")
    parser.add_argument("--seed", type=int, default=1, help="0: the streams on which the parameters were chosen")
    parser.add_argument("--processes", type=int, default=2)


def main(options: argparse.Namespace) -> list[Row]:
    os.nice(10)
    size, seed, each = options.requests, options.seed, options.streams // len(KINDS)
    rows, broken, shares, oracles = [], [], [], []
    with ProcessPoolExecutor(options.processes) as pool:
        for kind in KINDS:
            found = list(pool.map(partial(kept_of, kind=kind, size=size, seed=seed), range(each), chunksize=5))
            is_broken, share, oracle, whole, window, alarms = map(np.array, zip(*found, strict=True))
            print(
                f"{kind:9} broken {is_broken.mean():.1%}  on the device {share.mean():.1%}, oracle {oracle.mean():.1%}"
                f"  alarms {alarms.mean():.2f}\n"
                f"          quality {KEEP - whole.mean():.2%}, 95 % of streams at least "
                f"{KEEP - np.quantile(whole, 0.95):.2%}, worst 1,000 {KEEP - np.quantile(window, 0.95):.2%}"
            )
            rows.append(Row(f"the same share for {kind} streams", 100 * share.sum() / oracle.sum(), "%"))
            broken += is_broken.tolist()
            shares += share.tolist()
            oracles += oracle.tolist()
        drops = np.array(list(pool.map(partial(found_after, size=size, seed=seed), range(each), chunksize=5)))
        print(f"drop of ten points: labels until found, median {np.median(drops):.0f}, never {np.mean(drops < 0):.1%}")
        attacks: list[bool] = []
        for kind in ATTACKS:
            found_attacks = list(pool.map(partial(attacked, kind=kind, size=size, seed=seed), range(each), chunksize=5))
            lost, whole, window = map(np.array, zip(*found_attacks, strict=True))
            attacks += lost.tolist()
            print(f"adversary, {kind}: broken {lost.mean():.1%}  worst quality {KEEP - whole.max():.2%}, "
                  f"of 1,000 {KEEP - window.max():.2%}")  # fmt: skip
    return [
        Row("broken streams", 100 * float(np.mean(broken)), "%", 5.0),
        Row(
            "requests answered on the device, as a share of those that the oracle keeps there",
            100 * sum(shares) / sum(oracles),
            "%",
            80.0,
            "higher",
        ),
        *rows,
        Row(
            "labels that the device needs to notice that quality dropped by ten points, 95th percentile",
            float(np.quantile(drops, 0.95)),
            "",
            300.0,
        ),
        Row(
            "drops in quality of ten points that the device notices",
            100 * float(np.mean(drops >= 0)),
            "%",
            99.0,
            "higher",
        ),
        Row("broken streams of adversaries", 100 * float(np.mean(attacks)), "%", 5.0),
    ]
