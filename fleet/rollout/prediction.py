"""Prediction of a rollout: share on the device, cost and quality under the new policy, with intervals, from a replay of
the devices' records and from their labelled answers.

Devices are the unit, as in `verdict`: the estimate is a ratio of sums over devices, and three sources of variance are
kept apart, so that the interval fits what it is compared with:

1. Between devices. Devices that are compared are drawn from those that sent records, or contain them: `n` and `m` of
   nested draws differ by the variance between devices times |1/m - 1/n| (sampling from a finite population: Cochran,
   Sampling Techniques, 1977, section 2.6).
2. Of the estimate: few records of each device, and few labels in each cell of confidence.
3. Of the requests, or labels, that then happen.

Requests of the cache and private ones stay on the device and are counted, not replayed. A request whose outcome depends
on a signal that was not recorded widens the interval by its lowest and highest value. What changes with time, such as
other questions on other days, is not predicted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from causeway_server.router.bundle.protocol import UNMEASURED

LEAST_LABELS: Final = 30
_Z: Final = 1.6449  # two-sided 90 %
_PRIOR: Final = 2.0  # labels of the overall rate, which each cell has
_Array = NDArray[np.float64]
Name = Literal["on_device", "usd", "quality"]


class Replayed(msgspec.Struct, frozen=True):
    """A replayed record of a device. `low` and `high`: of its possible outcomes (whether the device answers, USD)."""

    weight: float
    on_device: tuple[float, float]
    usd: tuple[float, float]
    cell: int = UNMEASURED  # of the confidence of the device's answer


class RecordedDevice(msgspec.Struct, frozen=True):
    """The records of a device. `requests`: all of them; `fixed`: share that the cache answered or that are private."""

    requests: float
    fixed: float
    records: Sequence[Replayed]


class Labels(msgspec.Struct, frozen=True):
    """Labelled answers of a device, by cell: good and bad."""

    cells: Mapping[int, tuple[int, int]]


class Prediction(msgspec.Struct, frozen=True):
    """The prediction of a figure."""

    name: Name  # `on_device` and `quality` are shares, `usd` is the cost per 1,000 requests
    low: float  # the estimate with the lowest of possible outcomes
    high: float  # with the highest
    between: float  # variance between devices
    within: float  # variance of the estimate
    each: float  # variance of one request, or of one label of quality
    devices: float  # effective number of devices that sent records

    def interval(self, devices: float = math.inf, requests: float = math.inf) -> tuple[float, float]:
        """Return the 90 % interval of what so many devices show over so many requests, for quality over labels."""
        draw = abs(1.0 / devices - 1.0 / self.devices)
        error = _quantile(self.devices - 1.0) * math.sqrt(self.between * draw + self.within + self.each / requests)
        most = math.inf if self.name == "usd" else 1.0
        return max(0.0, self.low - error), min(most, self.high + error)


def predict(devices: Sequence[RecordedDevice], labels: Sequence[Labels] = ()) -> tuple[Prediction, ...]:
    """Return the predictions; none of fewer than two devices with records, and none of quality with few labels."""
    known = [one for one in devices if one.records and one.requests > 0]
    if len(known) < 2:
        return ()
    found = [_predict("on_device", known, 1.0), _predict("usd", known, 0.0)]
    labelled = sum(sum(map(sum, one.cells.values())) for one in labels)
    if labelled >= LEAST_LABELS and any(one.fixed < 1.0 for one in known):
        found.append(_quality(known, labels))
    return tuple(found)


def effective(requests: Sequence[float]) -> float:
    """Return the number of equal devices whose sum varies as much as that of these."""
    squares = sum(one * one for one in requests)
    return sum(requests) ** 2 / squares if squares else 0.0


def _quantile(df: float) -> float:
    """Return the 95th percentile of Student's t (Abramowitz and Stegun, 26.7.5)."""
    v, z = max(1.0, df), _Z
    return z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)


def _predict(name: Name, devices: Sequence[RecordedDevice], constant: float) -> Prediction:
    """Predict a figure that is `constant` for requests of the cache and private ones."""
    scale = 1000.0 if name == "usd" else 1.0
    values = [np.array([getattr(record, name) for record in one.records]) * scale for one in devices]
    weights = [np.array([record.weight for record in one.records]) for one in devices]
    fixed = np.array([one.fixed for one in devices])
    return _estimate(name, np.array([one.requests for one in devices]), values, weights, fixed, constant)


def _estimate(
    name: Name, totals: _Array, values: Sequence[_Array], weights: Sequence[_Array], fixed: _Array, constant: float
) -> Prediction:
    """Estimate the ratio of sums over devices.

    Args:
        totals: Requests of each device, [devices].
        values: Lowest and highest value of each record, [records, 2] of each device.
        weights: Requests that each record stands for, [records] of each device.
        fixed: Share of each device's requests that have the value `constant`, [devices].
    """
    part = totals / totals.sum()
    means = np.array([np.average(value, axis=0, weights=weight) for value, weight in zip(values, weights, strict=True)])
    size = np.array([effective(weight.tolist()) for weight in weights])
    middle = [value.mean(axis=1) for value in values]
    spread = np.array(
        [np.average((v - np.average(v, weights=w)) ** 2, weights=w) for v, w in zip(middle, weights, strict=True)]
    )
    pooled = float((size * spread).sum() / max(1.0, (size - 1.0).sum()))
    if name != "usd":  # shares of 0 or 1 in few records do not mean that there is no chance
        pooled = max(pooled, 1.0 / (float(size.sum()) + _PRIOR))
    low, high = (part * (fixed * constant + (1.0 - fixed) * means[:, side]) for side in (0, 1))
    whole = fixed * constant + (1.0 - fixed) * means.mean(axis=1)
    center, number = float((part * whole).sum()), effective(totals.tolist())
    noise = (1.0 - fixed) ** 2 * pooled / size
    seen = float((part * (whole - center) ** 2).sum()) * number / max(1e-9, number - 1.0)
    each = fixed * constant**2 + (1.0 - fixed) * (pooled + means.mean(axis=1) ** 2) - whole**2
    return Prediction(
        name=name,
        low=float(low.sum()),
        high=float(high.sum()),
        between=max(0.0, seen - float((part * noise).sum())),
        within=float((part**2 * noise).sum()),
        each=max(0.0, float((part * each).sum())),
        devices=number,
    )


def _quality(devices: Sequence[RecordedDevice], labels: Sequence[Labels]) -> Prediction:
    """Predict the share of good answers among requests neither private nor the cache's: all of a cloud's, of the
    device's as often as labelled answers of its cell of confidence.
    """
    good, bad = np.zeros(UNMEASURED + 1), np.zeros(UNMEASURED + 1)
    for one in labels:
        for cell, (right, wrong) in one.cells.items():
            good[cell] += right
            bad[cell] += wrong
    overall = float(bad.sum() / (good + bad).sum())
    counts = good + bad + _PRIOR
    wrong_share = (bad + _PRIOR * overall) / counts
    totals = np.array([one.requests * (1.0 - one.fixed) for one in devices])
    weights = [np.array([record.weight for record in one.records]) for one in devices]
    local = [np.array([record.on_device for record in one.records]) for one in devices]
    cells = [np.array([record.cell for record in one.records]) for one in devices]
    values = [1.0 - at[:, ::-1] * wrong_share[cell][:, None] for at, cell in zip(local, cells, strict=True)]
    found = _estimate("quality", totals, values, weights, np.zeros(len(devices)), 0.0)
    # The share of all requests that the device answers in each cell, by which errors of the cells add up.
    used = np.zeros(UNMEASURED + 1)
    for total, at, each, weight in zip(totals, local, cells, weights, strict=True):
        np.add.at(used, each, total / totals.sum() * at.mean(axis=1) * weight / weight.sum())
    share, deviation = float(used.sum()), wrong_share * (1.0 - wrong_share)
    excess = _excess(labels, wrong_share)
    rate = float((used * wrong_share).sum()) / share if share else 0.0
    return msgspec.structs.replace(
        found,
        between=found.between + share**2 * excess,
        within=found.within + float((used**2 * deviation / counts).sum()),
        each=share**2 * rate * (1.0 - rate),
    )


def _excess(labels: Sequence[Labels], wrong_share: _Array) -> float:
    """Return the variance between devices of the share of bad answers, beyond what their cells and chance explain."""
    above = squares = 0.0
    for one in labels:
        number = sum(right + wrong for right, wrong in one.cells.values())
        found = sum(wrong for _, wrong in one.cells.values())
        rates = [(right + wrong, wrong_share[cell]) for cell, (right, wrong) in one.cells.items()]
        above += (found - sum(count * rate for count, rate in rates)) ** 2
        above -= sum(count * rate * (1.0 - rate) for count, rate in rates)
        squares += number**2
    return max(0.0, float(above / squares)) if squares else 0.0
