"""Numbers that come as text, and durations and sizes with their units."""

from __future__ import annotations

import pytest

from causeway_server.router.errors import InvalidRequest
from causeway_server.router.numbers import read_page, whole_number, with_unit, without_unit


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("7", 7), ("100", 100), ("007", 7)])
def test_digits_are_a_number(text: str, number: int) -> None:
    assert whole_number(text, 100) == number


@pytest.mark.parametrize("text", ["", "x", "-1", "+1", "1.5", "1_0", " 1", "101", "\u0661", "9" * 5000, "0" * 5000])
def test_all_else_is_none(text: str) -> None:
    assert whole_number(text, 100) is None


def test_a_page_has_a_limit_and_a_bounded_id() -> None:
    assert read_page({}) == (20, "")
    assert read_page({"limit": "100", "after": "x" * 99}) == (100, "x" * 80)


@pytest.mark.parametrize("limit", ["", "0", "101", "x"])
def test_another_limit_is_refused(limit: str) -> None:
    with pytest.raises(InvalidRequest, match="from 1 to 100"):
        read_page({"limit": limit})


UNITS = [
    ("max_age_s", "35d", 3_024_000),
    ("wait_s", "90s", 90),
    ("wait_s", "1.5s", 1.5),
    ("wait_s", "5ms", 0.005),
    ("max_bytes", "8MiB", 8 << 20),
    ("max_bytes", "1000", 1000),
]


@pytest.mark.parametrize(("key", "text", "number"), UNITS)
def test_a_duration_or_size_is_written_and_read_in_its_unit(key: str, text: str, number: float) -> None:
    assert with_unit(key, number) == text
    assert without_unit(key, text) == number


@pytest.mark.parametrize(("key", "value"), [("rate_per_s", "5s"), ("name", "5s"), ("wait_s", "soon"), ("wait_s", 5)])
def test_a_value_without_a_unit_of_its_key_stays(key: str, value: object) -> None:
    assert without_unit(key, value) == value
