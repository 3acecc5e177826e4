"""What is kept for tenants that ask little, and for how long."""

from __future__ import annotations

from cloud_pool.admission.peaks import HALF_S, Peaks


def test_a_tenant_keeps_what_it_needed_at_once() -> None:
    """Three at once of late, one now: two are kept, besides nothing for the one that has all the others."""
    peaks = Peaks()
    for count in (1, 2, 3):
        peaks.seen("quiet", count, 1.0, 0.0)
    peaks.seen("flood", 70, 1.0, 0.0)
    assert peaks.kept({"quiet": 1, "flood": 13}, 16, 0.0) == 2.0


def test_nobody_keeps_more_than_its_share() -> None:
    """By weight: of sixteen places four are the light one's."""
    peaks = Peaks()
    peaks.seen("light", 60, 1.0, 0.0)
    peaks.seen("heavy", 60, 3.0, 0.0)
    assert peaks.kept({"light": 1, "heavy": 12}, 16, 0.0) == 3.0


def test_what_was_is_forgotten_by_halves() -> None:
    """Eight at once, then silence: four after a half-life, and none in the end."""
    peaks = Peaks()
    peaks.seen("quiet", 8, 1.0, 0.0)
    peaks.seen("flood", 70, 1.0, HALF_S)
    assert peaks.kept({"flood": 16}, 16, HALF_S) == 4.0
    peaks.seen("flood", 70, 1.0, 6 * HALF_S)
    assert peaks.kept({"flood": 16}, 16, 6 * HALF_S) == 0.0


def test_alone_nothing_is_kept() -> None:
    """There is nobody to keep it for."""
    peaks = Peaks()
    peaks.seen("only", 9, 1.0, 0.0)
    assert peaks.kept({"only": 2}, 16, 0.0) == 0.0
