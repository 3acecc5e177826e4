"""Routing curves of mixed traffic, and their figures as a Markdown table and as CSV points.

Traffic is mixed of requests in the device's domain, which make up a given share, and all others. Rows are weighted, not
sampled, so the mix adds no noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from ..calibrate.routing_curves import TARGET_ON_DEVICE, TARGET_RETAINED, Array64, RoutingCurve, routing_curves


class RoutingSample(msgspec.Struct, frozen=True):
    """One request with both models' results and the value of each signal (higher favours the device)."""

    device: float  # quality of the device's answer, 0 to 1
    cloud: float  # quality of the cloud's answer, 0 to 1
    in_domain: bool  # the request is in the device's domain
    signals: Mapping[str, float] = {}


class TrafficMix(msgspec.Struct, frozen=True):
    """The curves at one share of in-domain traffic."""

    domain_share: float
    device_exact: float  # exact match with all requests on the device
    cloud_exact: float  # exact match with all requests in the cloud
    curves: tuple[RoutingCurve, ...]

    @property
    def traffic(self) -> str:
        """Description of the mix in words, for the table's heading."""
        return f"{self.domain_share:.0%} of the traffic is in its domain"


def weights(samples: Sequence[RoutingSample], domain_share: float) -> Array64:
    """Return one weight per request, summing to 1, such that in-domain requests make up `domain_share`."""
    inside = np.array([sample.in_domain for sample in samples], bool)
    within, beyond = (side / max(side.sum(), 1) for side in (inside, ~inside))
    shares = domain_share * within + (1 - domain_share) * beyond
    total = float(shares.sum())
    return shares / total if total else np.full(len(samples), 1 / len(samples))


def mix(samples: Sequence[RoutingSample], domain_share: float, names: Sequence[str]) -> TrafficMix:
    """Return the curves of the named signals at one share of in-domain traffic."""
    share = weights(samples, domain_share)
    device, cloud = (np.array([getattr(sample, side) for sample in samples], float) for side in ("device", "cloud"))
    signals = {name: np.array([sample.signals[name] for sample in samples]) for name in names}
    curves = routing_curves(signals, device, cloud, share)
    return TrafficMix(domain_share, float(share @ device), float(share @ cloud), curves)


def table(mixes: Sequence[TrafficMix], rows: int) -> str:
    """Return Markdown with one table per mix. `rows` is the number of requests measured."""
    goal = f"to retain {TARGET_RETAINED:.0%} with {TARGET_ON_DEVICE:.0%} on device"
    header = (
        "signal",
        f"retained with {TARGET_ON_DEVICE:.0%} on device",
        f"most on device with {TARGET_RETAINED:.0%} retained",
        "mean retained",
        "goal",
    )
    lines = [
        f"The figures are weighted means over {rows} requests. *Retained* is the exact match of the pair of models,",
        "divided by that of the cloud model alone. *On device* is the share of requests that the device answers.",
        f"The goal is {goal}.",
    ]
    for mix in mixes:
        lines += [
            "",
            f"**{mix.domain_share:.0%} of the traffic is in the device's domain**",
            f"(exact match of the device alone: {mix.device_exact:.1%}, of the cloud alone: {mix.cloud_exact:.1%})",
            "",
            f"| {' | '.join(header)} |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {curve.name} | {retained_at(curve, TARGET_ON_DEVICE):.1%} "
            f"| {on_device_at(curve, TARGET_RETAINED):.0%} | {mean_retained(curve):.3f} "
            f"| {'met' if retained_at(curve, TARGET_ON_DEVICE) >= TARGET_RETAINED else 'missed'} |"
            for curve in mix.curves
        ]
    return "\n".join(lines) + "\n"


def points(mixes: Sequence[TrafficMix]) -> str:
    """Return CSV with the columns domain_share, signal, on_device, exact, retained."""
    lines = ["domain_share,signal,on_device,exact,retained"]
    for mix in mixes:
        for curve in mix.curves:
            head = f"{mix.domain_share:g},{curve.name}"
            lines += [f"{head},{point.on_device:.3f},{point.exact:.4f},{point.retained:.4f}" for point in curve.points]
    return "\n".join(lines) + "\n"


def on_device_at(curve: RoutingCurve, retained: float) -> float:
    """Return the largest share on the device that retains at least `retained`."""
    return max((point.on_device for point in curve.points if point.retained >= retained - 1e-9), default=0.0)


def retained_at(curve: RoutingCurve, on_device: float) -> float:
    """Return the best `retained` of the points with at least this share on the device."""
    return max((point.retained for point in curve.points if point.on_device >= on_device - 1e-9), default=0.0)


def mean_retained(curve: RoutingCurve) -> float:
    """Return the area under the curve: the mean of `retained` over all shares on the device."""
    steps = zip(curve.points, curve.points[1:], strict=False)
    return sum((b.on_device - a.on_device) * (a.retained + b.retained) / 2 for a, b in steps)
