"""Which boxes may change their bundle now, and which boxes a verdict must not count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

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

    def __post_init__(self) -> None:
        if not self.weekdays or not self.weekdays <= set(range(1, 8)):
            raise ValueError(f"window: weekdays are 1 (Monday) to 7, not {sorted(self.weekdays)}")
        if not (0 <= self.opens < MINUTES_OF_DAY and 0 <= self.closes < MINUTES_OF_DAY):
            raise ValueError(f"window: opens and closes are minutes of a day, not {self.opens} and {self.closes}")

    def is_open(self, weekday: int, minute: int) -> bool:
        """Whether it is open at this minute of an ISO weekday."""
        if self.opens < self.closes:
            return weekday in self.weekdays and self.opens <= minute < self.closes
        yesterday = (weekday - 2) % 7 + 1
        return (weekday in self.weekdays and minute >= self.opens) or (
            yesterday in self.weekdays and minute < self.closes
        )


class Candidate(msgspec.Struct, frozen=True):
    """A box whose plan names another bundle than the one that it runs.

    Attributes:
        device: Its id.
        site: Where it stands; boxes without a site are each a site of their own.
        position: Its place in the order of the rollout, `router.bundle.rollout.position`.
        weekday: ISO weekday at the box.
        minute: Minute of the day at the box.
    """

    device: str
    site: str | None
    position: int
    weekday: int
    minute: int


def may_change(
    candidates: Iterable[Candidate],
    changing: Collection[str],
    windows: Sequence[MaintenanceWindow],
    per_site: int,
    *,
    reverting: bool = False,
) -> list[str]:
    """Return the devices that may begin to change now, in the order of the rollout.

    A revert waits for no window and no limit: the boxes of a site that run a bad bundle are all worse off.

    Args:
        candidates: Boxes that have not begun.
        changing: The site of each box that is between its first effect and its commit, once for each box.
        windows: Of the cohort; none means always.
        per_site: At most so many boxes of a site change at once.
        reverting: The rollout is aborted.
    """
    ordered = sorted(candidates, key=lambda candidate: (candidate.position, candidate.device))
    if reverting:
        return [candidate.device for candidate in ordered]
    busy = Counter(changing)
    chosen: list[str] = []
    for candidate in ordered:
        if windows and not any(window.is_open(candidate.weekday, candidate.minute) for window in windows):
            continue
        if candidate.site is not None:
            if busy[candidate.site] >= per_site:
                continue
            busy[candidate.site] += 1
        chosen.append(candidate.device)
    return chosen


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


def is_cloned(boots: Sequence[str]) -> bool:
    """Whether two machines use one identity: a boot id that returns after another one was seen.

    A box that restarts has a new boot id and never the old one again; two machines report by turns.

    Args:
        boots: The boot ids of a device's reports, in order of arrival.
    """
    distinct = [boot for index, boot in enumerate(boots) if index == 0 or boots[index - 1] != boot]
    return len(set(distinct)) < len(distinct)


class DeviceEvent(msgspec.Struct, frozen=True):
    """A change of state, bundle or code."""

    at: float
    state: str
    running: str | None
    wanted: str | None
    rollout: str
    code: str
    reason: str
