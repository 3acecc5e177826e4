"""Which devices may change now: windows, sites, reverts; silent and cloned devices."""

from __future__ import annotations

import pytest

from causeway_server.fleet.rollout.settings import MaintenanceWindow, is_silent
from causeway_server.fleet.server.messages import BootHistory
from causeway_server.fleet.store.generations import CohortPace

NIGHT = MaintenanceWindow(frozenset({5}), 22 * 60, 4 * 60)


@pytest.mark.parametrize(
    ("weekday", "minute", "is_open"),
    [(5, 1319, False), (5, 1320, True), (6, 0, True), (6, 239, True), (6, 240, False), (5, 0, False), (4, 1400, False)],
)
def test_a_window_over_midnight(weekday: int, minute: int, is_open: bool) -> None:
    assert NIGHT.is_open(weekday, minute) is is_open


def test_sunday_night_reaches_into_monday() -> None:
    window = MaintenanceWindow(frozenset({7}), 23 * 60, 60)
    assert window.is_open(1, 30)
    assert not window.is_open(7, 30)


def test_devices_outside_their_window_wait_for_it() -> None:
    """The device's own local time counts; a revert waits for no window."""
    pace = CohortPace((NIGHT,))
    assert pace.may_change(5, 1330, 0)
    assert not pace.may_change(5, 600, 0)
    assert CohortPace().may_change(5, 600, 0)
    assert CohortPace((NIGHT,), reverting=True).may_change(5, 600, 0)


@pytest.mark.parametrize(("per_site", "busy", "may_change"), [(0, 9, True), (1, 0, True), (1, 1, False), (3, 2, True)])
def test_no_site_changes_more_devices_than_allowed(per_site: int, busy: int, may_change: bool) -> None:
    """A revert waits for no limit."""
    assert CohortPace(per_site=per_site).may_change(1, 0, busy) is may_change
    assert CohortPace(per_site=per_site, reverting=True).may_change(1, 0, busy)


@pytest.mark.parametrize(
    ("last_seen", "silent"),
    [(50.0, False), (150.0, True), (1150.0, False)],
    ids=["off before the stage", "lost since", "seen lately"],
)
def test_only_a_device_that_was_seen_before_can_go_silent(last_seen: float, silent: bool) -> None:
    assert is_silent(last_seen, began=1000.0, now=2000.0, silence_s=900.0) is silent


@pytest.mark.parametrize(
    ("boots", "cloned"), [("", False), ("a", False), ("aabbc", False), ("aba", True), ("abcb", True)]
)
def test_a_boot_id_that_returns_is_a_clone(boots: str, cloned: bool) -> None:
    """A restart is not a clone, however often."""
    history = BootHistory()
    for seq, boot in enumerate(boots):
        history = history.with_report(boot, seq) or history
    assert history.cloned is cloned
