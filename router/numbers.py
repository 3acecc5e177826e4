"""Whole numbers that callers send as text, in queries, headers and form fields."""

from __future__ import annotations


def whole_number(text: str, most: int) -> int | None:
    """Return a whole number from 0 to `most`, or None for any other text.

    Python's `int` takes digits of every script, signs and underscores, and raises ValueError from 4,300 digits on.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(most))):
        return None
    number = int(text)
    return number if number <= most else None
