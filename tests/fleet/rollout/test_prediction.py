"""The prediction of a rollout: its intervals cover what happens in simulated rollouts as often as they say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from causeway_server.fleet.rollout.prediction import Labels, Prediction, RecordedDevice, Replayed, effective, predict

DEVICES, RECORDS, CELLS = 20, 60, (4, 10, 16, 22)
RISK = np.array([0.5, 0.3, 0.12, 0.03])  # of a bad answer, by cell
USD = 0.002


class World:
    """Devices that differ: in traffic, in their share of private requests, in questions, and in how hard these are."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = np.random.default_rng(seed)
        self.traffic = rng.integers(1500, 3000, DEVICES)
        self.private = rng.beta(2, 18, DEVICES)
        self.local = rng.beta(14, 6, DEVICES)  # share of the others that the new policy keeps on the device
        self.mix = rng.dirichlet((4, 6, 8, 10), DEVICES)
        self.harder = np.exp(rng.normal(0.0, 0.25, DEVICES))

    def requests(self, device: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return for each request whether the device answers it, its cell and whether the device's answer is bad."""
        cell = self.rng.choice(len(CELLS), count, p=self.mix[device])
        local = self.rng.random(count) < self.local[device]
        bad = self.rng.random(count) < np.minimum(0.95, RISK[cell] * self.harder[device])
        return local, cell, bad

    def predict(self, labels: int = 60) -> dict[str, Prediction]:
        devices, labelled = [], []
        for device in range(DEVICES):
            local, cell, _ = self.requests(device, RECORDS)
            records = [
                Replayed(20.0, (float(at), float(at)), (0.0 if at else USD,) * 2, CELLS[one])
                for at, one in zip(local, cell, strict=True)
            ]
            fixed = self.rng.binomial(self.traffic[device], self.private[device]) / self.traffic[device]
            devices.append(RecordedDevice(float(self.traffic[device]), fixed, records))
            _, cell, bad = self.requests(device, labels)
            cells = {CELLS[at]: (int((~bad[cell == at]).sum()), int(bad[cell == at].sum())) for at in range(len(CELLS))}
            labelled.append(Labels(cells))
        return {one.name: one for one in predict(devices, labelled)}

    def happens(self, members: list[int]) -> tuple[dict[str, float], float]:
        """Return the figures of these devices after the change, and the number of labels behind that of quality."""
        total = kept = usd = eligible = local_count = 0.0
        bad_labels = labels = 0
        for device in members:
            count = int(self.traffic[device])
            private = self.rng.binomial(count, self.private[device])
            local, _, bad = self.requests(device, count - private)
            total, kept, usd = total + count, kept + private + local.sum(), usd + USD * (~local).sum()
            eligible, local_count = eligible + len(local), local_count + local.sum()
            drawn = local & (self.rng.random(len(local)) < 0.05)
            labels, bad_labels = labels + int(drawn.sum()), bad_labels + int((bad & drawn).sum())
        quality = 1.0 - local_count / eligible * bad_labels / labels
        return {"on_device": kept / total, "usd": 1000.0 * usd / total, "quality": quality}, labels


@pytest.mark.parametrize("members", [1, 5, 20])
def test_the_intervals_cover_what_happened_in_200_rollouts(members: int) -> None:
    """For a first stage of one device, a quarter of them, and all: 85 to 95 % of intervals of 90 %."""
    covered = {"on_device": 0, "usd": 0, "quality": 0}
    for seed in range(200):
        world = World(seed)
        predictions = world.predict()
        chosen = world.rng.permutation(DEVICES)[:members].tolist()
        happened, labels = world.happens(chosen)
        traffic = [float(world.traffic[device]) for device in chosen]
        for name, value in happened.items():
            count = labels if name == "quality" else sum(traffic)
            low, high = predictions[name].interval(effective(traffic), count)
            covered[name] += low <= value <= high
    assert all(170 <= count <= 190 for count in covered.values()), covered


def test_unknown_outcomes_widen_the_interval() -> None:
    def devices(high: float) -> list[RecordedDevice]:
        records = [Replayed(1.0, (0.0, high), (0.0, 0.0)) for _ in range(10)]
        return [RecordedDevice(10.0, 0.0, [*records, *[Replayed(1.0, (1.0, 1.0), (0.0, 0.0))] * 10])] * 4

    (known, *_), (unknown, *_) = predict(devices(0.0)), predict(devices(1.0))
    assert (known.low, known.high, unknown.low, unknown.high) == (0.5, 0.5, 0.5, 1.0)


def test_little_evidence_predicts_nothing() -> None:
    """One device tells nothing about others; quality needs labels."""
    record = Replayed(1.0, (1.0, 1.0), (0.0, 0.0))
    one, none = RecordedDevice(10.0, 0.0, [record]), RecordedDevice(10.0, 0.0, [])
    assert predict([one, none]) == ()
    few = [Labels({3: (9, 2)})]
    assert [each.name for each in predict([one, one], few)] == ["on_device", "usd"]
    assert [each.name for each in predict([one, one], few * 3)] == ["on_device", "usd", "quality"]
    private = RecordedDevice(10.0, 1.0, [record])
    assert [each.name for each in predict([private, private], few * 3)] == ["on_device", "usd"]


def test_the_same_answer_to_a_few_records_is_not_certain() -> None:
    devices = [RecordedDevice(100.0, 0.0, [Replayed(1.0, (1.0, 1.0), (0.0, 0.0))] * 20)] * 4
    low, high = predict(devices)[0].interval(4.0, 400.0)
    assert 0.9 < low < 0.99
    assert high == 1.0


def test_a_share_stays_a_share() -> None:
    wide = Prediction("on_device", 0.9, 0.95, 1.0, 1.0, 1.0, 5.0)
    assert wide.interval(2.0, 10.0) == (0.0, 1.0)
    assert wide.interval() == (0.0, 1.0)
    assert math.isinf(msgspec_high(wide))


def msgspec_high(one: Prediction) -> float:
    return Prediction("usd", one.low, math.inf, 0.0, 0.0, 0.0, 5.0).interval()[1]
