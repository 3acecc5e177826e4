"""Routing curves as an SVG plot."""

from __future__ import annotations

from collections.abc import Iterator

from .routing_curves import TARGET_ON_DEVICE, TARGET_RETAINED, RoutingCurve, TrafficMix

_COLOURS = {
    "edge.quality + confidence": "#1b7837",
    "edge.quality": "#2166ac",
    "confidence": "#762a83",
    "short prompts": "#b35806",
    "random": "#878787",
    "oracle": "#bdbdbd",
}
_WIDTH, _HEIGHT, _LEFT, _TOP = 560, 340, 52, 34
_LOWEST = 0.0  # bottom of the vertical scale


def picture(mix: TrafficMix, traffic: str = "") -> str:
    """Return an SVG plot of one mix: `on_device` to the right, `retained` upwards; the goal is the shaded corner.

    Args:
        traffic: what the requests are; by default the share in the device's domain.
    """
    traffic = traffic or f"{mix.domain_share:.0%} of the traffic is in its domain"
    highest = max([1.0, *(point.retained for curve in mix.curves for point in curve.points)])
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif">',
        "<style>text {font-size: 11px}</style>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="18">Exact match retained, by share of requests on the device',
        f"({traffic})</text>",
        *_axes(highest),
        *(_line(curve, highest, number) for number, curve in enumerate(mix.curves)),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _axes(highest: float) -> Iterator[str]:
    left, right, bottom = _x(0.0), _x(1.0), _y(_LOWEST, highest)
    goal, top = _x(TARGET_ON_DEVICE), _y(highest, highest)
    height = _y(TARGET_RETAINED, highest) - top
    yield f'<rect x="{goal:.1f}" y="{top:.1f}" width="{right - goal:.1f}" height="{height:.1f}" fill="#e5f5e0"/>'
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
    return _TOP + (highest - retained) / (highest - _LOWEST) * (_HEIGHT - _TOP - 28)
