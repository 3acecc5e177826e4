"""What a benchmark returns: ratios in one run against the limit."""

from __future__ import annotations

import msgspec

from .yardstick import yardstick_us


class Row(msgspec.Struct, frozen=True):
    name: str  # "(a) decide p99"
    value: float
    unit: str  # "us", "x", "MB", "s"
    limit: float | None = None
    better: str = "lower"  # lower | higher
    note: str = ""  # the absolute figures behind a ratio

    @property
    def holds(self) -> bool | None:
        if self.limit is None:
            return None
        return self.value <= self.limit if self.better == "lower" else self.value >= self.limit


def scaled(name: str, us: float, limit: float | None = None, note: str = "") -> Row:
    """A short operation's time as a multiple of the yardstick; the limit is such a multiple too."""
    behind = f"{us:.3g} us, the yardstick {yardstick_us():.3g} us"
    return Row(name, us / yardstick_us(), "x", limit, note=f"{behind}; {note}" if note else behind)
