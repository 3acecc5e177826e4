"""What a benchmark or a scenario returns: figures against their limits, ratios within one run where there are any."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from .yardstick import yardstick_us


class Row(msgspec.Struct, frozen=True):
    name: str  # "routing decision, median"
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


def checks(failures: Sequence[str]) -> list[Row]:
    """Return the row of a scenario that judges by itself: the number of checks that failed, and which."""
    return [Row("failed checks", len(failures), "", 0.0, note="; ".join(failures))]


def scaled(name: str, us: float, limit: float | None = None, note: str = "") -> Row:
    """A short operation's time as a multiple of the yardstick; the limit is such a multiple too."""
    behind = f"{us:.3g} us; one yardstick is {yardstick_us():.3g} us"
    return Row(name, us / yardstick_us(), "x", limit, note=f"{behind}; {note}" if note else behind)
