"""Spending in the last hour, the local day and the local month. Explicit Unix time, bounded memory, restorable.

Amounts are kept by date, so that a clock that jumps forth and back loses no spending.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, tzinfo

import msgspec

from ..types import SpendSignals

_DAYS = 62  # two months: the current one is always complete
_HOUR_MINUTES = 60


class SpendState(msgspec.Struct, frozen=True):
    """The state to restore after a restart. Dates are local, ISO 8601."""

    days: tuple[tuple[str, float], ...] = ()  # (date, USD), oldest first
    minutes: tuple[tuple[int, float], ...] = ()  # (Unix minute, USD)


class SpendTracker:
    """Adds up spending in USD. `zone` None means the time zone of the system."""

    def __init__(self, zone: tzinfo | None = None, restored: SpendState | None = None) -> None:
        state = restored or SpendState()
        self._zone = zone
        self._days = dict(state.days)
        self._minutes = dict(state.minutes)

    def add(self, usd: float, now_unix: float) -> None:
        """Add an amount. Raises ValueError if it is negative or not finite."""
        if not 0.0 <= usd < float("inf"):
            raise ValueError(f"not an amount of money: {usd!r}")
        if usd == 0.0:
            return
        day, minute = self._day(now_unix), int(now_unix // 60)
        self._days[day] = self._days.get(day, 0.0) + usd
        self._minutes[minute] = self._minutes.get(minute, 0.0) + usd
        self._drop_distant(minute, day)

    def signals(self, now_unix: float) -> SpendSignals:
        minute, day = int(now_unix // 60), self._day(now_unix)
        month = day[:7]
        return SpendSignals(
            usd_hour=sum(usd for when, usd in self._minutes.items() if abs(when - minute) < _HOUR_MINUTES),
            usd_today=self._days.get(day, 0.0),
            usd_month=sum(usd for known, usd in self._days.items() if known[:7] == month),
        )

    def state(self) -> SpendState:
        return SpendState(days=tuple(sorted(self._days.items())), minutes=tuple(sorted(self._minutes.items())))

    def _day(self, now_unix: float) -> str:
        return datetime.fromtimestamp(now_unix, UTC).astimezone(self._zone).date().isoformat()

    def _drop_distant(self, minute: int, day: str) -> None:
        # By distance, not by age: entries from a clock far in the future must not push out the days that count.
        self._minutes = {when: usd for when, usd in self._minutes.items() if abs(when - minute) < _HOUR_MINUTES}
        if len(self._days) > _DAYS:
            today = date.fromisoformat(day)
            nearest = sorted(self._days, key=lambda known: abs(date.fromisoformat(known) - today))[:_DAYS]
            self._days = {known: self._days[known] for known in nearest}
