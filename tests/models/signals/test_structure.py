"""Structural features of a prompt."""

from __future__ import annotations

import re

import pytest

from causeway_server.models.signals import agreement, structure


@pytest.mark.parametrize("pattern", [structure.CHOICE_LINE, agreement.CHOICE])
def test_a_choice_is_looked_for_in_its_own_line(pattern: re.Pattern[str]) -> None:
    """A pattern that goes on over empty lines reads each of them again from every line: 8 KiB took seconds."""
    assert pattern.match("\n A) x") is None
    assert pattern.match("\t A) x") is not None


def test_choices_behind_empty_lines_are_counted() -> None:
    text = "Which?\n\n\n A) one\n\n  (B) two\n3. three\n" + "\n" * 8192
    assert structure.has_choices(text)
    assert round(structure.structure(text)[4], 3) == 1.386  # log1p(3)
