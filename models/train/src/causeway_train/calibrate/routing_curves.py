"""Plots in SVG of a router signal's quality on a pair of models: routing curves, and the calibration of its
probabilities.

A signal ranks the requests: the device answers those ranked highest, the cloud answers the rest. Each point of a curve
gives the share of requests on the device and the exact match that the pair retains, relative to the cloud model's own
(more than 1 where the device's model is better).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from causeway_server.models.signals.drift import bins_of

Array64 = NDArray[np.float64]
STEPS = 100
TARGET_RETAINED = 0.95  # goal: share of the cloud model's exact match
TARGET_ON_DEVICE = 0.7  # goal: share of requests that the device answers
_COLOURS = {
    "edge.quality + confidence": "#1b7837",
    "edge.quality": "#2166ac",
    "confidence": "#762a83",
    "short prompts": "#b35806",
    "random": "#878787",
    "oracle": "#bdbdbd",
}
_WIDTH, _HEIGHT, _LEFT, _TOP = 560, 340, 52, 34


class CurvePoint(msgspec.Struct, frozen=True):
    on_device: float  # share of requests that the device answers
    exact: float  # exact match of the pair, over all requests
    retained: float  # `exact` divided by the cloud model's own exact match


class RoutingCurve(msgspec.Struct, frozen=True):
    """Points by rising `on_device`, from 0 to 1."""

    name: str
    points: tuple[CurvePoint, ...]


def routing_curves(
    signals: Mapping[str, Array64], device: Array64, cloud: Array64, weights: Array64
) -> tuple[RoutingCurve, ...]:
    """Return the curves of the signals, of random routing, and of an oracle that knows both answers.

    Args:
        signals: [requests] each, higher favours the device.
        device, cloud: [requests], the quality of both answers, 0 to 1.
        weights: [requests], how much each request counts.
    """
    signals = {**signals, "random": np.zeros(len(weights)), "oracle": device - cloud}
    return tuple(_curve(name, signal, weights / weights.sum(), device, cloud) for name, signal in signals.items())


def apgr(signal: Array64, device: Array64, cloud: Array64, weights: Array64 | None = None) -> float | None:
    """Return the average performance gap recovered (Ong et al. 2024, arXiv 2406.18665) of one signal.

    The mean quality of the pair over all shares in the cloud, where 0 is the device's and 1 the cloud's; random
    routing has 0.5. None if the cloud is not better.

    Args:
        signal: [requests], higher favours the device.
        device, cloud: [requests], the quality of both answers.
        weights: [requests], how much each request counts; default: all the same.
    """
    share = np.ones(len(signal)) if weights is None else weights
    share = share / share.sum()
    gap = float(share @ (cloud - device))
    if gap <= 0:
        return None
    exact = _exact(signal, share, device, cloud)
    mean = float((exact[1:] + exact[:-1]).mean() / 2)
    return (mean - float(share @ device)) / gap


def _exact(signal: Array64, share: Array64, device: Array64, cloud: Array64) -> Array64:
    """Return the quality of the pair at each of `STEPS` + 1 shares on the device.

    Requests with equal values have no order: they move from the cloud to the device in proportion.
    """
    values, group = np.unique(-signal, return_inverse=True)
    masses, gains = (np.bincount(group, weights=w, minlength=len(values)) for w in (share, share * (device - cloud)))
    moved, gained = (np.concatenate([[0.0], np.cumsum(w)]) for w in (masses, gains))
    exact: Array64 = float(share @ cloud) + np.interp(np.linspace(0.0, 1.0, STEPS + 1), moved, gained)
    return exact


def _curve(name: str, signal: Array64, share: Array64, device: Array64, cloud: Array64) -> RoutingCurve:
    on_device = np.linspace(0.0, 1.0, STEPS + 1)
    exact = _exact(signal, share, device, cloud)
    cloud_exact = float(share @ cloud)
    points = zip(on_device.tolist(), exact.tolist(), strict=True)
    return RoutingCurve(name, tuple(CurvePoint(x, y, y / cloud_exact if cloud_exact else 1.0) for x, y in points))


def chart(curves: Sequence[RoutingCurve], traffic: str) -> str:
    """Return an SVG plot of curves: `on_device` to the right, `retained` upwards; the goal is the shaded corner.

    Args:
        traffic: A description of the requests.
    """
    highest = max([1.0, *(point.retained for curve in curves for point in curve.points)])
    goal, top = _x(TARGET_ON_DEVICE), _y(highest, highest)
    width, height = _x(1.0) - goal, _y(TARGET_RETAINED, highest) - top
    return plot(
        f"Exact match retained, by share of requests on the device ({traffic})",
        f'<rect x="{goal:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" fill="#e5f5e0"/>',
        *_grid(highest),
        *(_line(curve, highest, number) for number, curve in enumerate(curves)),
    )


def reliability(probabilities: Array64, truth: NDArray[np.bool_]) -> str:
    """Return an SVG plot of ten bins: the stated probability to the right, the observed frequency upwards."""
    bins = bins_of(probabilities)
    dots = []
    for inside in (bins == number for number in np.unique(bins)):
        x, y = _x(float(probabilities[inside].mean())), _y(float(truth[inside].mean()), 1.0)
        radius = 2 + 12 * float(inside.mean()) ** 0.5
        dots.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="#1b7837" fill-opacity="0.7"/>')
    return plot(
        "Good enough: observed, by stated probability (area: number of prompts)",
        *_grid(1.0),
        f'<line x1="{_x(0.0)}" y1="{_y(0.0, 1.0)}" x2="{_x(1.0)}" y2="{_y(1.0, 1.0)}" stroke="#bdbdbd"/>',
        *dots,
    )


def plot(title: str, *marks: str) -> str:
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif">',
        "<style>text {font-size: 11px}</style>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="18">{title}</text>',
        *marks,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _grid(highest: float) -> Iterator[str]:
    left, right, bottom = _x(0.0), _x(1.0), _y(0.0, highest)
    for step in range(0, 11, 2):
        share = step / 10
        yield f'<text x="{_x(share):.1f}" y="{bottom + 15:.1f}" text-anchor="middle">{share:.0%}</text>'
        yield f'<text x="{left - 6:.1f}" y="{_y(share, highest) + 4:.1f}" text-anchor="end">{share:.0%}</text>'
        yield (
            f'<line x1="{left:.1f}" x2="{right:.1f}" y1="{_y(share, highest):.1f}" y2="{_y(share, highest):.1f}" '
            'stroke="#eeeeee"/>'
        )


def _line(curve: RoutingCurve, highest: float, number: int) -> str:
    colour = _COLOURS.get(curve.name, "black")
    path = " ".join(f"{_x(point.on_device):.1f},{_y(point.retained, highest):.1f}" for point in curve.points)
    at = _HEIGHT - 125 + 15 * number
    return (
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>'
        f'<text x="{_x(0.03):.1f}" y="{at}" fill="{colour}">{curve.name}</text>'
    )


def _x(share: float) -> float:
    return _LEFT + share * (_WIDTH - _LEFT - 18)


def _y(retained: float, highest: float) -> float:
    return _TOP + (highest - retained) / highest * (_HEIGHT - _TOP - 28)
