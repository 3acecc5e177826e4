"""Which boxes may change now: windows, sites, reverts; silent and cloned boxes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.rollout.boxes import Candidate, MaintenanceWindow, is_cloned, is_silent, may_change

NIGHT = MaintenanceWindow(frozenset({5}), 22 * 60, 4 * 60)


def candidate(device: str, site: str | None = None, *, weekday: int = 1, minute: int = 0) -> Candidate:
    return Candidate(device, site, int(device), weekday, minute)


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


def test_boxes_outside_their_window_wait_for_it() -> None:
    """The box's own local time counts; a revert waits for no window."""
    boxes = [candidate("1", weekday=5, minute=1330), candidate("2", weekday=5, minute=600)]
    assert may_change(boxes, (), (NIGHT,), 1) == ["1"]
    assert may_change(boxes, (), (), 1) == ["1", "2"]
    assert may_change(boxes, (), (NIGHT,), 1, reverting=True) == ["1", "2"]


@given(
    st.lists(st.tuples(st.integers(0, 99), st.sampled_from(["a", "b", "c", None])), unique_by=lambda pair: pair[0]),
    st.lists(st.sampled_from(["a", "b"]), max_size=4),
    st.integers(1, 3),
)
def test_no_site_changes_more_boxes_than_allowed(
    pairs: list[tuple[int, str | None]], changing: list[str], per_site: int
) -> None:
    """Boxes that change already count; those without a site do not wait; the order is the rollout's."""
    boxes = [candidate(str(number), site) for number, site in pairs]
    chosen = may_change(boxes, changing, (), per_site)
    assert chosen == sorted(chosen, key=int)
    sites = {box.device: box.site for box in boxes}
    for site in ("a", "b", "c"):
        begun = [device for device in chosen if sites[device] == site]
        room = max(0, per_site - changing.count(site))
        assert len(begun) == min(room, sum(box.site == site for box in boxes))
    assert {box.device for box in boxes if box.site is None} <= set(chosen)


@pytest.mark.parametrize(
    ("last_seen", "silent"),
    [(50.0, False), (150.0, True), (1150.0, False)],
    ids=["off before the stage", "lost since", "seen lately"],
)
def test_only_a_box_that_was_seen_before_can_go_silent(last_seen: float, silent: bool) -> None:
    assert is_silent(last_seen, began=1000.0, now=2000.0, silence_s=900.0) is silent


@pytest.mark.parametrize(
    ("boots", "cloned"), [("", False), ("a", False), ("aabbc", False), ("aba", True), ("abcb", True)]
)
def test_a_boot_id_that_returns_is_a_clone(boots: str, cloned: bool) -> None:
    """A restart is not a clone, however often."""
    assert is_cloned(list(boots)) is cloned


def test_wrong_windows_are_refused() -> None:
    with pytest.raises(ValueError, match="weekdays"):
        MaintenanceWindow(frozenset({0}), 0, 1)
    with pytest.raises(ValueError, match="minutes of a day"):
        MaintenanceWindow(frozenset({1}), 0, 1440)
