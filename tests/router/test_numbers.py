"""Whole numbers that come as text."""

from __future__ import annotations

import pytest

from causeway_server.router.errors import InvalidRequest
from causeway_server.router.numbers import read_page, whole_number


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
