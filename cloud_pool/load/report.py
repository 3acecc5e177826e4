"""Figures of a load, and its page: tables and plots without anything from other servers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jinja2
import msgspec

from .client import Sample

_TEMPLATE = Path(__file__).with_name("report.html.jinja")
_WIDTH, _HEIGHT = 640.0, 200.0


class Percentiles(msgspec.Struct, frozen=True):
    """Nearest-rank percentiles of all values, in seconds."""

    p50: float
    p90: float
    p99: float
    worst: float


class Summary(msgspec.Struct, frozen=True):
    """Figures of a load, as its clients saw it."""

    seconds: float  # duration from the beginning to the end of the last answer
    requests: int
    faults: dict[str, int]  # failed requests by status or kind
    routes: dict[str, int]  # whole answers by `x-causeway-route`; empty before other servers
    requests_per_s: float  # whole answers per second
    input_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    first_token: Percentiles | None  # from when a request was due to its first text
    total: Percentiles | None  # from when a request was due to its end
    between_tokens: Percentiles | None  # mean time between the tokens of an answer, from its first to its last
    sent_late: Percentiles | None  # from when a request was due to its sending: shows a client that is too slow


def summarize(samples: Sequence[Sample]) -> Summary:
    """Compute the figures. Failed requests count in `requests` and `faults` alone."""
    whole = [one for one in samples if not one.fault]
    seconds = max((one.ended_s for one in samples), default=0.0)
    output = sum(one.output_tokens for one in whole)
    return Summary(
        seconds=seconds,
        requests=len(samples),
        faults=dict(Counter(one.fault for one in samples if one.fault).most_common()),
        routes=dict(Counter(one.route for one in whole if one.route).most_common()),
        requests_per_s=len(whole) / seconds if seconds else 0.0,
        input_tokens=sum(one.input_tokens for one in whole),
        output_tokens=output,
        output_tokens_per_s=output / seconds if seconds else 0.0,
        first_token=percentiles([one.first_s - one.due_s for one in whole if one.first_s is not None]),
        total=percentiles([one.ended_s - one.due_s for one in whole]),
        between_tokens=percentiles(
            [
                (one.ended_s - one.first_s) / (one.output_tokens - 1)
                for one in whole
                if one.first_s is not None and one.output_tokens > 1
            ]
        ),
        sent_late=percentiles([one.sent_s - one.due_s for one in samples]),
    )


def percentiles(values: Sequence[float]) -> Percentiles | None:
    """Return nearest-rank percentiles; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    p50, p90, p99 = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.9, 0.99))
    return Percentiles(p50, p90, p99, ordered[-1])


def write_page(path: Path, title: str, settings: Mapping[str, object], samples: Sequence[Sample]) -> None:
    """Write the report: one file, which loads nothing."""
    summary = summarize(samples)
    whole = [one for one in samples if not one.fault]
    figures = {name: getattr(summary, name) for name in ("first_token", "total", "between_tokens", "sent_late")}
    plots = {
        "Time to the first token, by when the request was due": _dots(
            [one for one in whole if one.first_s is not None], lambda one: (one.first_s or 0.0) - one.due_s
        ),
        "Time to the end, by when the request was due": _dots(whole, lambda one: one.ended_s - one.due_s),
    }
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    page = template.render(
        title=title, settings=settings, summary=summary, figures=figures, plots=plots, width=_WIDTH, height=_HEIGHT
    )
    path.write_text(page, encoding="utf-8")


class Plot(msgspec.Struct, frozen=True):
    """Points in the coordinates of the drawing, and the ends of its axes in seconds."""

    points: tuple[tuple[float, float], ...]
    across_s: float
    up_s: float


def _dots(samples: Sequence[Sample], value: Callable[[Sample], float]) -> Plot:
    across_s = max((one.due_s for one in samples), default=0.0) or 1.0
    up_s = max((value(one) for one in samples), default=0.0) or 1.0
    points = ((one.due_s / across_s * _WIDTH, _HEIGHT - value(one) / up_s * _HEIGHT) for one in samples)
    return Plot(tuple((round(x, 1), round(y, 1)) for x, y in points), across_s, up_s)
