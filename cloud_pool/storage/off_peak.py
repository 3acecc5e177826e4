"""Off-peak hours: when jobs with `window: off_peak` may start. Pure; the time comes from Redis.

Hours are those of a wall clock in a time zone, so a night in which it is changed is an hour shorter or longer. An hour
that such a night skips begins with the next one that exists; of one that it repeats the first counts.
"""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, time, timedelta
from typing import Final
from zoneinfo import ZoneInfo

import msgspec

from router.errors import ConfigError, InvalidRequest

from .config import OffPeakConfig

_HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")
_DAYS: Final = 9  # ahead: a job waits a day at most


class Opening(msgspec.Struct, frozen=True):
    """One night. Unix ms; `end` is not part of it."""

    start: int
    end: int


class OffPeakHours:
    """The hours of a configuration."""

    def __init__(self, config: OffPeakConfig) -> None:
        """Raises ConfigError."""
        self.price_share = config.price_share
        self._hours: tuple[time, time] | None = None
        try:
            self._zone = ZoneInfo(config.timezone)
        except (KeyError, ValueError, OSError):
            reason = f"{config.timezone!r} is no time zone of this machine (tzdata), such as Europe/Berlin"
            raise ConfigError(reason, where="jobs.off_peak.timezone") from None
        if not config.hours:
            return
        match = _HOURS.fullmatch(config.hours)
        if match is None or match[1] + match[2] == match[3] + match[4]:
            raise ConfigError(f"write them as 22:00-06:00, not {config.hours!r}", where="jobs.off_peak.hours")
        self._hours = time(int(match[1]), int(match[2])), time(int(match[3]), int(match[4]))

    def __bool__(self) -> bool:
        """Whether there are any."""
        return self._hours is not None

    def openings(self, now_ms: int) -> list[Opening]:
        """Return the nights that are not over, in order, for a week."""
        if self._hours is None:
            return []
        today = datetime.fromtimestamp(now_ms / 1000.0, self._zone).date()
        nights = (self._opening(today + timedelta(days=days), *self._hours) for days in range(-1, _DAYS))
        return [night for night in nights if night.end > now_ms]

    def wait_ms(self, now_ms: int) -> int:
        """Return how long until they begin; 0 within them, or without any."""
        openings = self.openings(now_ms)
        return max(openings[0].start - now_ms, 0) if openings else 0

    def _opening(self, day: date, start: time, end: time) -> Opening:
        last = day if end > start else day + timedelta(days=1)
        return Opening(self._unix_ms(day, start), self._unix_ms(last, end))

    def _unix_ms(self, day: date, at: time) -> int:
        return int(datetime.combine(day, at, self._zone).astimezone(UTC).timestamp() * 1000)


def no_off_peak_hours() -> InvalidRequest:
    """Return the error for a job that asks for hours that do not exist."""
    return InvalidRequest("there are no off-peak hours here (jobs.off_peak.hours)", param="window")
