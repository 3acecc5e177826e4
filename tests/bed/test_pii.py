"""A fixed part of the bed of personal data: recall and precision, and answers in random chunks."""

from __future__ import annotations

from .pii import chunkings, score
from .pii_texts import texts


def test_values_are_found_and_others_are_not() -> None:
    report = score(texts(600, 3, "b"))
    assert {kind for kind, one in report.by_class.items() if one.planted} == {
        "card", "email", "iban", "ip", "mac", "phone", "secret",
    }  # fmt: skip
    for kind, one in report.by_class.items():
        assert one.recall >= 0.95, (kind, report.misses[:5])
        assert one.precision >= 0.99, (kind, report.misses[:5])
    assert report.clean == 300
    assert report.alarm_share <= 0.005


def test_masked_answers_are_restored_from_any_chunks() -> None:
    assert chunkings(300, 5) == 0
