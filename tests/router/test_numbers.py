"""Whole numbers that come as text."""

from __future__ import annotations

import pytest

from router.numbers import whole_number


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("7", 7), ("100", 100), ("007", 7)])
def test_digits_are_a_number(text: str, number: int) -> None:
    assert whole_number(text, 100) == number


@pytest.mark.parametrize("text", ["", "x", "-1", "+1", "1.5", "1_0", " 1", "101", "\u0661", "9" * 5000, "0" * 5000])
def test_all_else_is_none(text: str) -> None:
    assert whole_number(text, 100) is None
