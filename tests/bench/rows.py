"""What a benchmark returns: ratios in one run against the limit."""

from __future__ import annotations

import msgspec


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
