"""A routing curve on paper: a table in Markdown, the points as CSV, a picture as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .routing_curves import KEEP, STAY, RoutingCurve, TrafficMix

_COLOURS = {
    "edge.quality + confidence": "#1b7837",
    "edge.quality": "#2166ac",
    "confidence": "#762a83",
    "short prompts": "#b35806",
    "random": "#878787",
    "oracle": "#bdbdbd",
}
_WIDTH, _HEIGHT, _LEFT, _TOP = 560, 340, 52, 34
_LOWEST = 0.0  # of the picture's scale of what is kept


def table(mixes: Sequence[TrafficMix], rows: int) -> str:
    """Markdown: a part for every mix."""
    lines = [
        f"Over {rows} requests, weighted. *kept*: exact match of the pair over that of the cloud's model alone;",
        f"*stay*: share of requests that the device answers. The goal is {KEEP:.0%} kept with {STAY:.0%} staying.",
    ]
    for mix in mixes:
        lines += [
            "",
            f"**{mix.own_share:.0%} of the traffic is of the device's domain**",
            f"(alone, the device answers {mix.device_right:.1%} rightly, the cloud {mix.cloud_right:.1%})",
            "",
            f"| signal | kept with {STAY:.0%} staying | most that stays with {KEEP:.0%} kept | mean kept | goal |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {curve.name} | {curve.kept_at(STAY):.1%} | {curve.stay_at(KEEP):.0%} | {curve.area:.3f} "
            f"| {'holds' if curve.kept_at(STAY) >= KEEP else 'misses'} |"
            for curve in mix.curves
        ]
    return "\n".join(lines) + "\n"


def points(mixes: Sequence[TrafficMix]) -> str:
    """CSV: own_share, signal, stay, right, kept."""
    lines = ["own_share,signal,stay,right,kept"]
    for mix in mixes:
        for curve in mix.curves:
            head = f"{mix.own_share:g},{curve.name}"
            lines += [f"{head},{point.stay:.3f},{point.right:.4f},{point.kept:.4f}" for point in curve.points]
    return "\n".join(lines) + "\n"


def picture(mix: TrafficMix) -> str:
    """SVG of one mix: what stays to the right, what is kept upwards; the goal is the shaded corner."""
    highest = max([1.0, *(point.kept for curve in mix.curves for point in curve.points)])
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif">',
        "<style>text {font-size: 11px}</style>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="18">Kept of the cloud\'s exact match, by share answered on the device',
        f"({mix.own_share:.0%} of the traffic is of its domain)</text>",
        *_axes(highest),
        *(_line(curve, highest, number) for number, curve in enumerate(mix.curves)),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _axes(highest: float) -> Iterator[str]:
    left, right, bottom = _x(0.0), _x(1.0), _y(_LOWEST, highest)
    goal, top = _x(STAY), _y(highest, highest)
    height = _y(KEEP, highest) - top
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
    path = " ".join(f"{_x(point.stay):.1f},{_y(point.kept, highest):.1f}" for point in curve.points)
    at = _HEIGHT - 125 + 15 * number
    return (
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>'
        f'<text x="{_x(0.03):.1f}" y="{at}" fill="{colour}">{curve.name}</text>'
    )


def _x(share: float) -> float:
    return _LEFT + share * (_WIDTH - _LEFT - 18)


def _y(kept: float, highest: float) -> float:
    return _TOP + (highest - kept) / (highest - _LOWEST) * (_HEIGHT - _TOP - 28)
