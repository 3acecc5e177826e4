"""How good a routing signal is on a pair of models: answers kept on the device, and the right ones among all answers.

The stream is mixed of two kinds: requests of the device's own domain, which make a given share of the traffic, and all
others. Rows are not drawn, they are weighted, so a mix adds no chance of its own. A signal orders the requests; the
device answers those that it ranks highest, the cloud the rest. A point of the curve says how many stay and how many of
the teacher's right answers the pair keeps (its exact match over the teacher's own: more than 1 where the device knows
better).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

Reals = NDArray[np.float64]
STEPS = 100
KEEP = 0.95  # of the teacher's exact match: the bound that a curve is asked about
STAY = 0.7  # of the requests on the device


class RoutingSample(msgspec.Struct, frozen=True):
    """One request: was each model right, is it of the device's domain, and what each signal says (more: device)."""

    device: bool
    cloud: bool
    own: bool
    signals: Mapping[str, float] = {}


class CurvePoint(msgspec.Struct, frozen=True):
    stay: float  # share of requests that the device answers
    right: float  # exact match of the pair, over all requests
    kept: float  # the same over the cloud's own


class RoutingCurve(msgspec.Struct, frozen=True):
    """Points by rising `stay`, from nothing on the device to everything."""

    name: str
    points: tuple[CurvePoint, ...]

    def stay_at(self, kept: float) -> float:
        """The most that can stay while at least this share of the cloud's exact match is kept."""
        return max((point.stay for point in self.points if point.kept >= kept - 1e-9), default=0.0)

    def kept_at(self, stay: float) -> float:
        """What is kept with at least this share on the device, at best."""
        return max((point.kept for point in self.points if point.stay >= stay - 1e-9), default=0.0)

    @property
    def area(self) -> float:
        """The mean of `kept` over all shares."""
        steps = zip(self.points, self.points[1:], strict=False)
        return sum((b.stay - a.stay) * (a.kept + b.kept) / 2 for a, b in steps)


class TrafficMix(msgspec.Struct, frozen=True):
    """One share of the device's domain, and the curves there."""

    own_share: float
    device_right: float  # exact match with everything on the device
    cloud_right: float
    curves: tuple[RoutingCurve, ...]


def weights(pairs: Sequence[RoutingSample], own_share: float) -> Reals:
    """Of each request, summing to 1, so that the device's domain makes `own_share`."""
    own = np.array([pair.own for pair in pairs], bool)
    shares = np.where(own, own_share / max(1, own.sum()), (1 - own_share) / max(1, (~own).sum()))
    total = float(shares.sum())
    return shares / total if total else np.full(len(pairs), 1 / len(pairs))


def mix(pairs: Sequence[RoutingSample], own_share: float, names: Sequence[str]) -> TrafficMix:
    """The curves of the named signals, of chance, and of who knew both answers beforehand."""
    share = weights(pairs, own_share)
    device, cloud = (np.array([getattr(pair, side) for pair in pairs], float) for side in ("device", "cloud"))
    curves = [_curve(name, np.array([pair.signals[name] for pair in pairs]), share, device, cloud) for name in names]
    return TrafficMix(
        own_share=own_share,
        device_right=float(share @ device),
        cloud_right=float(share @ cloud),
        curves=(*curves, _chance(share, device, cloud), _curve("oracle", device - cloud, share, device, cloud)),
    )


def _curve(name: str, signal: Reals, share: Reals, device: Reals, cloud: Reals) -> RoutingCurve:
    """Requests with the same value stay or go together: in proportion, as a tie has no order."""
    values, group = np.unique(-signal, return_inverse=True)
    stays, gains = (np.bincount(group, weights=w, minlength=len(values)) for w in (share, share * (device - cloud)))
    at, gained = (np.concatenate([[0.0], np.cumsum(w)]) for w in (stays, gains))
    wanted = np.linspace(0.0, 1.0, STEPS + 1)
    best = float(share @ cloud)
    right = best + np.interp(wanted, at, gained)
    return RoutingCurve(name, tuple(_point(s, r, best) for s, r in zip(wanted.tolist(), right.tolist(), strict=True)))


def _chance(share: Reals, device: Reals, cloud: Reals) -> RoutingCurve:
    return _curve("random", np.zeros(len(share)), share, device, cloud)


def _point(stay: float, right: float, best: float) -> CurvePoint:
    return CurvePoint(stay, right, right / best if best else 1.0)
