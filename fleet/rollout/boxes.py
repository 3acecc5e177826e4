"""When boxes may change their bundle, which boxes a verdict must not count, and what the history of one shows."""

from __future__ import annotations

import msgspec

MINUTES_OF_DAY = 1440


class MaintenanceWindow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A time of the week in which boxes may change, in each box's own local time.

    Attributes:
        weekdays: ISO days on which the window opens, Monday is 1.
        opens: Minute of the day.
        closes: Minute of the day; at or before `opens` it is on the next day.
    """

    weekdays: frozenset[int]
    opens: int
    closes: int

    def is_open(self, weekday: int, minute: int) -> bool:
        """Whether it is open at this minute of an ISO weekday."""
        if self.opens < self.closes:
            return weekday in self.weekdays and self.opens <= minute < self.closes
        yesterday = (weekday - 2) % 7 + 1
        return (weekday in self.weekdays and minute >= self.opens) or (
            yesterday in self.weekdays and minute < self.closes
        )


def is_silent(last_seen: float, began: float, now: float, silence_s: float) -> bool:
    """Whether a box counts as lost: reachable when the stage began, and not seen since for longer than `silence_s`.

    A box that was off before the stage is neither lost nor a member: it gets its bundle when it comes back.

    Args:
        last_seen: When the box last reported.
        began: When the stage began.
        now: All in unix seconds by the control plane's clock.
        silence_s: Of the settings.
    """
    return last_seen >= began - silence_s and now - last_seen > silence_s


class DeviceEvent(msgspec.Struct, frozen=True):
    """A change of state, bundle or code."""

    at: float
    state: str
    running: str | None
    wanted: str | None
    rollout: str
    code: str
    reason: str
