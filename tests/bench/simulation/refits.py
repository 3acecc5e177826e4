"""Refits of a pair's calibration on generated streams, with and without: `python -m tests.bench refit`.

The user of this part: a device whose traffic differs from the prompts that its pair was calibrated on. Load: streams
of 10,000 requests of six kinds, from eight clients, whose shares and mean confidences differ. What the calibration
states drifts: not at all; by a common slope and offset; by an offset for each kind, from the start or from the middle
of the stream. Labels come at the rates of the promise (tests/bench/simulation/contract.py), and a refit is proposed
after every hundredth. The golden answers are drawn from the stream's law without drift. Faults: a fifth of the labels
is false, all of one client or of every client, on a calibration that is true or has drifted by kind; and clients that
report half of the device's bad answers and a tenth of its good ones as bad.

The figures are about the requests after the first quarter: log loss beyond that of the true probabilities, and answers
of the device that no cloud was asked for. A stream is broken as in the contract's. Penalties, rates and bounds were
chosen on streams with `--seed 0`; the figures are those of another seed.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter, deque
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from causeway_server.edge_node.signals.corrections import EVERY, LEAST, REFUTED, WINDOW, RefitLabel, propose, watched
from causeway_server.models.signals.calibration import Correction, Refit, log_odds
from causeway_server.models.signals.pair import GoldenAnswer
from causeway_server.models.signals.promise import KeptPromise, PromiseDraw, PromiseRecord

from ..rows import Row
from .contract import PROMISE, Floats, Served

DRIFTS = ("none", "shift", "by kind", "by kind, late", "poisoned, one client", "poisoned, drift, one client",
          "poisoned, all clients", "feedback")  # fmt: skip
KINDS, CLIENTS, GOLDEN, POISONED = 6, 8, 300, 0.2


@dataclass
class Stream:
    """Requests: stated log odds, kinds, clients, the true log odds, bad answers, and whether labels are false."""

    odds: Floats
    kinds: NDArray[np.int64]
    clients: NDArray[np.int64]
    true: Floats
    bad: NDArray[np.bool_]
    false: NDArray[np.bool_]
    golden: list[GoldenAnswer]

    @classmethod
    def draw(cls, rng: np.random.Generator, drift: str, size: int) -> Stream:
        kinds = rng.choice(KINDS, size, p=rng.dirichlet(np.full(KINDS, 2.0)))
        odds = rng.normal(rng.uniform(0.6, 1.6) + rng.normal(0.0, 0.5, KINDS)[kinds], rng.uniform(1.1, 1.9))
        clients = rng.choice(CLIENTS, size, p=[POISONED, *rng.dirichlet(np.full(CLIENTS - 1, 4.0)) * (1 - POISONED)])
        at = rng.choice(size, GOLDEN)
        golden_good = rng.random(GOLDEN) < _chance(odds[at])
        states = zip(kinds[at].tolist(), odds[at].tolist(), golden_good.tolist(), strict=True)
        golden = [GoldenAnswer(kind, stated, stated, good) for kind, stated, good in states]
        true = odds.copy()
        if drift == "shift":
            true = rng.uniform(0.6, 1.2) * odds + rng.uniform(-1.0, 0.5)
        elif drift.startswith("by kind") or "drift" in drift:
            true = odds + rng.normal(0.0, 0.7, KINDS)[kinds] * (
                np.arange(size) >= (size // 2 if "late" in drift else 0)
            )
        false = np.zeros(size, bool)
        if drift.startswith("poisoned"):
            false = clients == 0 if "one" in drift else rng.random(size) < POISONED
        return cls(odds, kinds, clients, true, rng.random(size) >= _chance(true), false, golden)


def _chance(odds: Floats) -> Floats:
    chances: Floats = 1 / (1 + np.exp(-odds))
    return chances


@dataclass
class Device:
    """The device's refits: those adopted, and how often one was refused or given up."""

    stream: Stream
    refits: bool
    labels: deque[RefitLabel] = field(default_factory=lambda: deque(maxlen=WINDOW))
    refit: Refit | None = None
    against: float = 1.0
    since: int = EVERY - LEAST
    results: Counter[str] = field(default_factory=Counter)

    def add(self, label: RefitLabel) -> None:
        self.labels.append(label)
        if self.refit is not None:
            self.against = watched(self.against, self.refit, label)
            if self.against > REFUTED:
                self.give_up()
        self.since += 1
        if self.refits and self.since >= EVERY:
            self.since = 0
            found = propose(list(self.labels), self.stream.golden, self.refit, "bench", 0.0)
            if isinstance(found, Refit):
                self.refit, self.against = found, 1.0
            self.results["adopted" if isinstance(found, Refit) else found] += 1

    def give_up(self) -> None:
        if self.refit is not None:
            self.refit = None
            self.results["given up"] += 1

    @property
    def correction(self) -> Correction:
        return Correction() if self.refit is None else self.refit.confidence


def serve(stream: Stream, seed: int, *, refits: bool, feedback: bool) -> tuple[Served, Floats, Counter[str]]:
    """Serve a stream; return what became of it, the corrected log odds, and what became of refits."""
    size = len(stream.odds)
    kept, chance, device = KeptPromise(PROMISE, PromiseRecord("bench")), random.Random(seed), Device(stream, refits)
    on, wrong, labelled = (np.zeros(size, bool) for _ in range(3))
    counts, corrected = np.zeros(size, np.int64), stream.odds.copy()
    shipped = _chance(stream.odds).tolist()
    each = zip(stream.odds.tolist(), (stream.kinds * refits).tolist(), stream.clients.tolist(), stream.bad.tolist(),
               stream.false.tolist(), strict=True)  # fmt: skip
    for at, (odds, kind, client, bad, false) in enumerate(each):
        threshold = kept.signals.threshold
        corrected[at] = device.correction.odds(odds, kind)
        on_device = threshold is not None and corrected[at] >= log_odds(threshold)
        share = kept.draw_share(on_device=on_device)
        kept.count(None if threshold is None else shipped[at], kind)
        on[at], wrong[at] = on_device, on_device and bad
        alarms = kept.record.alarms
        if chance.random() < share:
            labelled[at], good = on_device, bad == false
            kept.label(shipped[at], PromiseDraw(on_device, share, threshold is not None), good=good, kind=kind)
            device.add(RefitLabel(kind, odds, odds, good, client))
        if feedback and on_device and chance.random() < (0.5 if bad else 0.1):
            kept.object(shipped[at], kind)
        if kept.record.alarms > alarms:
            device.give_up()
        kept.read_with(device.correction)
        counts[at] = kept.record.answers
    return Served(on, wrong, labelled, counts, np.zeros(size), kept.record.alarms), corrected, device.results


def measured(at: int, drift: str, size: int, seed: int) -> tuple[list[tuple[float, float, bool, float]], Counter[str]]:
    """Return log loss, share on the device, whether it is broken and alarms, without and with refits; and results."""
    found = []
    for refits in (False, True):
        stream = Stream.draw(np.random.default_rng((seed, DRIFTS.index(drift), at)), drift, size)
        served, odds, results = serve(stream, at, refits=refits, feedback=drift == "feedback")
        true = _chance(stream.true)
        losses = [true * np.logaddexp(0, -one) + (1 - true) * np.logaddexp(0, one) for one in (odds, stream.true)]
        after = slice(size // 4, None)
        loss, share = (losses[0] - losses[1])[after].mean(), (served.device & ~served.labelled)[after].mean()
        found.append((float(loss), float(share), served.is_broken, float(served.alarms)))
    return found, results


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=24, help="of each drift")
    parser.add_argument("--requests", type=int, default=10_000, help="of each stream")
    parser.add_argument("--seed", type=int, default=1, help="0: the streams on which the parameters were chosen")
    parser.add_argument("--drifts", nargs="+", choices=DRIFTS, default=DRIFTS)
    parser.add_argument("--processes", type=int, default=2)


def main(options: argparse.Namespace) -> list[Row]:
    rows = []
    with ProcessPoolExecutor(options.processes) as pool:
        for drift in options.drifts:
            each = partial(measured, drift=drift, size=options.requests, seed=options.seed)
            found = list(pool.map(each, range(options.streams), chunksize=2))
            figures = np.array([one for one, _ in found], float)  # [streams, without and with, figures]
            (before, after), results = figures.mean(axis=0), sum((one for _, one in found), Counter[str]())
            gains = figures[:, 1, 1] - figures[:, 0, 1]
            error = gains.std() / len(gains) ** 0.5
            shown = ", ".join(f"{name} {count / options.streams:.2f}" for name, count in sorted(results.items()))
            print(
                f"{drift:28} loss {before[0]:.4f} → {after[0]:.4f}  device {before[1]:.1%} → {after[1]:.1%} "
                f"(± {2 * error:.1%})  broken {before[2]:.0%} → {after[2]:.0%}\n"
                f"{'':28} a stream: alarms {before[3]:.2f} → {after[3]:.2f}; {shown}",
                flush=True,
            )
            figures_of = ("log loss beyond the truth's", 1000.0, "mnat"), ("share on the device", 100.0, "%"), (
                "broken streams", 100.0, "%")  # fmt: skip
            rows += [
                Row(f"refit, {drift}: {name}", scale * after[at], unit, note=f"without {scale * before[at]:.1f}")
                for at, (name, scale, unit) in enumerate(figures_of)
            ]
    return rows
